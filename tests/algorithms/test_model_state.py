"""Reading a model's values and loading them back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import algorithms as fl


class Mixed(nn.Module):
    """A tied weight, a frozen bias, batch norm, and a buffer that is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.decoder = nn.Linear(2, 2, bias=False)
        self.decoder.weight = self.encoder.weight
        self.encoder.bias.requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)


def test_parts_of_a_model() -> None:
    """Trainable in the model's order and once when tied, frozen apart, persistent buffers with floats first."""
    state = fl.read_state(Mixed())
    assert list(state.trainable) == ["encoder.weight", "norm.weight", "norm.bias"]
    assert list(state.frozen) == ["encoder.bias"]
    assert list(state.buffers) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_integer_buffers_come_last() -> None:
    """A counter registered before a floating buffer is read after it."""
    model = nn.Module()
    model.register_buffer("count", torch.tensor(1))
    model.register_buffer("mean", torch.tensor(1.0))
    assert list(fl.read_state(model).buffers) == ["mean", "count"]


def test_a_read_state_can_be_loaded() -> None:
    """Loading one model's state into another makes their state dicts equal."""
    source, target = Mixed(), Mixed()
    fl.load_state(target, fl.read_state(source))
    assert all(torch.equal(value, target.state_dict()[name]) for name, value in source.state_dict().items())


def test_state_is_a_copy_in_both_directions() -> None:
    """Changing the model changes no state read from it or loaded into it, and no state asks for gradients."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    state = fl.read_state(model)
    fl.load_state(model, state)
    nn.init.zeros_(model.weight)
    assert state.trainable["weight"].item() == 1.0
    assert not state.trainable["weight"].requires_grad


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("trainable", {"norm.bias": None}, r"trainable parameters: .* \['norm.bias'\] missing"),
        ("frozen", {"other": torch.zeros(1)}, r"frozen parameters: .* \['other'\] unknown"),
        ("trainable", {"norm.bias": torch.zeros(1)}, r"'norm.bias': expected float32\[2\], got float32\[1\]"),
        ("buffers", {"norm.num_batches_tracked": torch.tensor(1.0)}, r"expected int64\[\], got float32\[\]"),
    ],
    ids=["missing", "unknown", "shape", "dtype"],
)
def test_state_of_another_model_is_refused_whole(part: str, change: dict[str, Tensor | None], message: str) -> None:
    """A difference in any part is named, and nothing is copied."""
    model, other = Mixed(), fl.read_state(Mixed())
    before = fl.read_state(model)
    tensors = {name: tensor for name, tensor in {**getattr(other, part), **change}.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        fl.load_state(model, replace(other, **{part: tensors}))
    assert torch.equal(fl.read_state(model).trainable["encoder.weight"], before.trainable["encoder.weight"])
