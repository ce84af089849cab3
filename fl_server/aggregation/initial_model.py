"""Loads a run's first model from a safetensors file, whose names are those of the task's model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from algorithms.model_state import state_views, tied_names
from fl_server.errors import InvalidInput

_FIELD, _EXPECTED = "initial_model", "a safetensors file of this task's model"


def load_initial(module: nn.Module, path: Path, *, keep_frozen: bool) -> None:
    """Load the values of a safetensors file with the model's own names; of tied weights, any of the names is enough.

    keep_frozen: the frozen parameters stay. The file may leave them out, and must not have other values of them.
    Raises InvalidInput for a file that does not fit.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block, and a device never ends
            raise InvalidInput(_FIELD, _EXPECTED, path)
        values = _with_tied(load_file(path), tied_names(module))
        if keep_frozen:
            values = _with_frozen(values, module)
        module.load_state_dict(values, strict=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InvalidInput(_FIELD, _EXPECTED, error) from error


def _with_frozen(values: dict[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """The values with the frozen parameters of the module. Raises InvalidInput for others in the file."""
    frozen = dict(state_views(module).frozen)
    frozen |= {name: frozen[of] for name, of in tied_names(module).items() if of in frozen}
    for name in frozen.keys() & values.keys():
        if values[name].dtype != frozen[name].dtype or not torch.equal(values[name], frozen[name]):
            raise InvalidInput(
                _FIELD,
                'with task.frozen = "local", a file without the frozen parameters, or with those of the task',
                f"other values of {name!r}",
            )
    return {**values, **frozen}


def _with_tied(values: dict[str, torch.Tensor], tied: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """The values under all names of tied weights."""
    first = {of: values[name] for name, of in tied.items() if name in values and of not in values}
    values = {**values, **first}
    return {**values, **{name: values[of] for name, of in tied.items() if name not in values and of in values}}
