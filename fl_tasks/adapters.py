"""Low-rank adapters (LoRA, Hu et al., 2021) through the library peft, and the frozen weights below them.

An adapter adds B A to the weight of a linear layer, scaled. Federated averaging takes the means of A and B apart, and
mean(B) mean(A) is not mean(B A). With the same frozen A on all clients only B is averaged, and mean(B) A = mean(B A):
FFA-LoRA (Sun et al., 2024), which `freeze_a` sets up. peft is imported when a model with adapters is made: it brings
transformers along, which takes seconds and about 170 MB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fl_tasks.base import TaskError

Model = TypeVar("Model", bound=nn.Module)


def load_weights(model: nn.Module, path: Path) -> None:
    """Read a model's whole state from a safetensors file.

    Raises TaskError if the file cannot be read, or has other names or shapes.
    """
    try:
        weights = load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise TaskError(f"expected the weights of this model in the safetensors file {path}: {error}") from error
    expected, came = _shapes(model.state_dict()), _shapes(weights)
    wrong = sorted(name for name in expected.keys() | came.keys() if expected.get(name) != came.get(name))
    if wrong:
        first = wrong[0]
        raise TaskError(
            f"expected the weights of this model in {path}, but {len(wrong)} tensors differ: {first} has the shape"
            f" {expected.get(first, 'none')} here and {came.get(first, 'none')} in the file"
        )
    model.load_state_dict(weights)


def add_lora(model: nn.Module, rank: int, layers: Sequence[str]) -> nn.Module:
    """Freeze the model and add adapters of a rank to the linear layers with these names, scaled by 2.

    B is 0, so the outputs do not change. Both matrices are trainable. Raises TaskError if peft is not installed.
    """
    try:
        from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - only models with adapters pay for it
    except ModuleNotFoundError as error:
        raise TaskError("adapters need the library peft: pip install 'impetus-fl[lora]'") from error
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(layers))
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


def freeze_a(model: Model, seed: int = 0) -> Model:
    """Freeze the matrices A of a model with peft's adapters, so that only B is trained. Returns the model.

    A is drawn anew, uniform as in peft, from a generator with this seed instead of torch's default one: it must be the
    same on all devices, also where each makes its own. Raises TaskError for a model without such matrices.
    """
    matrices = [value for name, value in model.named_parameters() if ".lora_A." in name]
    if not matrices:
        raise TaskError("expected a model with adapters of peft, whose names have .lora_A., got none")
    generator = torch.Generator().manual_seed(seed)
    for matrix in matrices:
        bound = 1 / math.sqrt(matrix.shape[1])
        with torch.no_grad():
            matrix.copy_(torch.empty(matrix.shape).uniform_(-bound, bound, generator=generator))
        matrix.requires_grad_(False)
    return model


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in tensors.items()}
