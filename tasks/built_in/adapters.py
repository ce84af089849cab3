"""Low-rank adapters (LoRA, Hu et al., 2021) through the library peft, and the frozen weights below them.

The library is imported when a model with adapters is made: it brings transformers along, which takes seconds and about
170 MB. By default A is frozen and only B is trained (FFA-LoRA, Sun et al., 2024): the effective update of a layer is
B A, and the mean of clients' products equals mean(B) A only if they have the same A.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tasks.base import TaskError


def load_weights(model: nn.Module, path: Path) -> None:
    """Read a model's whole state from a safetensors file.

    Raises TaskError if the file cannot be read, or has other names or shapes.
    """
    try:
        weights = load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise TaskError(
            f"expected the model's weights in the safetensors file {path}, which cannot be read: {error}. Correct the"
            " task's option base"
        ) from error
    expected, found = _shapes(model.state_dict()), _shapes(weights)
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        first = wrong[0]
        raise TaskError(
            f"expected this model's weights in {path}, but {len(wrong)} tensors differ: {first} has the shape"
            f" {expected.get(first, 'none')} here and {found.get(first, 'none')} in the file. Correct the task's option"
            " base"
        )
    model.load_state_dict(weights)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in tensors.items()}


def add_lora(model: nn.Module, rank: int, layers: Sequence[str], *, train_a: bool) -> nn.Module:
    """Freeze the model and add adapters of a rank to the linear layers with these names.

    B is 0 at first, so that the outputs do not change. A is drawn from a generator with a fixed seed, not from torch's
    default one: a frozen A must be the same on all devices. With train_a both are trained. Raises TaskError if peft is
    not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - only models with adapters pay for it
    except ModuleNotFoundError as error:
        raise TaskError("adapters need the library peft: pip install impetus-fl[lora]") from error
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(layers), bias="none")
    adapted: nn.Module = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(rank)
    for name, parameter in adapted.named_parameters():
        if ".lora_A." in name:
            bound = 1 / math.sqrt(parameter.shape[1])
            with torch.no_grad():
                parameter.uniform_(-bound, bound, generator=generator)
            parameter.requires_grad_(train_a)
    return adapted


def adapter_config(adapted: Any) -> dict[str, object]:
    """peft's description of the adapters, as in adapter_config.json."""
    found: dict[str, object] = adapted.peft_config["default"].to_dict()
    return found
