"""Reads saved models of a task: safetensors files, and folders of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from algorithms.model_state import tied_names
from fl_ops.errors import NotFound, UsageError
from fl_ops.simulate.output.results import MODEL
from fl_ops.simulate.seeds import SAVED


def read_model(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of a run's folder, or of the run that a folder has.

    A folder is that of a seed of `fl simulate --out`, one above with one seed, or the save of a run that has not ended,
    as `cells/unfinished` of a comparison has them. Raises NotFound, and UsageError for another file.
    """
    if not path.exists():
        raise NotFound(f"there is no {path}: expected a model as safetensors, or the folder of a simulated run")
    if path.is_dir():
        return _of_folder(path)
    if not path.is_file():  # reading a pipe would block, and a device never ends
        raise UsageError(f"{path}: expected a safetensors file or a folder")
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise UsageError(f"{path}: expected a model as safetensors, got another file ({error})") from error


def _of_folder(path: Path) -> dict[str, Tensor]:
    seeds = sorted(folder for folder in path.glob("seed-*") if folder.is_dir())
    if len(seeds) > 1:
        names = ", ".join(folder.name for folder in seeds[:_SHOWN])
        raise UsageError(f"{path} has the runs of {len(seeds)} seeds ({names}): name the folder of one or more of them")
    folder = seeds[0] if seeds else path
    saves = [save for place in (folder / SAVED, folder) for save in sorted(place.glob(f"run-*/round-*/{MODEL}"))]
    for file in (folder / MODEL, *reversed(saves)):
        if file.exists():
            return read_model(file)
    raise NotFound(
        f"{path} has no model: expected {MODEL} of `fl simulate --out`, or the save of a run. `fl compare` keeps the"
        " models of unfinished cells only; simulate the run with `fl simulate --out`"
    )


_SHOWN = 4


def fill(model: nn.Module, values: Mapping[str, Tensor], task: str, path: Path) -> None:
    """Load the values into a task's model. Raises UsageError if they are of another one, or not finite."""
    own = model.state_dict()
    tied = {name: of for name, of in tied_names(model).items() if name not in values}
    whole = {**values, **{name: values[of] for name, of in tied.items() if of in values}}
    if difference := _difference(own, whole):
        raise UsageError(f"{path} is not a model of the task {task}: {difference}")
    for name, tensor in whole.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UsageError(f"{path}: expected finite values, got others in {name!r}: the run has diverged")
    model.load_state_dict(whole)


def _difference(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> str:
    """The first difference of the layout; empty if there is none."""
    if missing := [name for name in own if name not in given]:
        return f"expected the tensor {missing[0]!r} {_form(own[missing[0]])}, got none of this name"
    if more := [name for name in given if name not in own]:
        return f"got the tensor {more[0]!r} {_form(given[more[0]])}, which the task's model does not have"
    for name, tensor in own.items():
        if tensor.shape != given[name].shape or tensor.dtype != given[name].dtype:
            return f"expected the tensor {name!r} as {_form(tensor)}, got {_form(given[name])}"
    return ""


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
