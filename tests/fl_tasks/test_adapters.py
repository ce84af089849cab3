"""Adapters of peft, and weights from a file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fl_tasks import TaskError
from fl_tasks.adapters import add_lora, freeze_a, load_weights


def small() -> nn.Module:
    """Two linear layers; the first, "0", gets adapters."""
    return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))


class Adapted(nn.Module):
    """The adapter of a layer of 6 to 4 with the names of peft, whose import takes seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.ModuleDict({"default": nn.Linear(6, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, 4, bias=False)})


def matrices(model: nn.Module, kind: str) -> list[nn.Parameter]:
    """The matrices lora_A or lora_B."""
    return [value for name, value in model.named_parameters() if f".{kind}." in name]


@pytest.mark.slow
def test_adapters_are_trained_and_the_model_is_not() -> None:
    """Rank 3 on a layer of 6 to 4: A is [3, 6] and B [4, 3], and these alone have gradients."""
    model = add_lora(small(), 3, ["0"])
    assert [list(value.shape) for value in model.parameters() if value.requires_grad] == [[3, 6], [4, 3]]


@pytest.mark.slow
def test_a_frozen_a_is_the_same_under_every_seed() -> None:
    """A does not depend on torch's default generator, is within peft's bound 1 / sqrt(6), and has no gradient."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found += matrices(freeze_a(add_lora(small(), 3, ["0"])), "lora_A")
    assert torch.equal(found[0], found[1])
    assert not found[0].requires_grad
    assert 0.2 < float(found[0].abs().max()) <= 6**-0.5
    assert not torch.equal(found[0], matrices(freeze_a(add_lora(small(), 3, ["0"]), seed=1), "lora_A")[0])


def effective(model: nn.Module, inputs: Tensor) -> Tensor:
    """What the adapter adds to the first layer's output, with B set to a random matrix."""
    (b,) = matrices(model, "lora_B")
    (a,) = matrices(model, "lora_A")
    return inputs @ a.T @ b.T


@pytest.mark.parametrize("frozen", [True, False])
def test_averaging_is_exact_only_with_a_common_a(*, frozen: bool) -> None:
    """The averaged adapter's output is the mean of the clients' outputs with a frozen A, and differs without."""
    inputs = torch.randn(5, 6)
    clients = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(Adapted())
        model = freeze_a(model) if frozen else model
        nn.init.normal_(matrices(model, "lora_B")[0])
        clients.append(model)
    means = [torch.stack(values).mean(0) for values in zip(*(client.parameters() for client in clients), strict=True)]
    expected = torch.stack([effective(client, inputs) for client in clients]).mean(0)
    averaged = clients[0]
    with torch.no_grad():
        for parameter, mean in zip(averaged.parameters(), means, strict=True):
            parameter.copy_(mean)
    assert torch.allclose(effective(averaged, inputs), expected, atol=1e-6) is frozen


def test_a_model_without_adapters_is_refused() -> None:
    """Nothing would be frozen, and no one would notice."""
    with pytest.raises(TaskError, match="a model with adapters of peft, whose names have .lora_A., got none"):
        freeze_a(small())


def test_without_peft_the_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra that brings the library is named."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(TaskError, match=r"pip install 'impetus-fl\[lora\]'"):
        add_lora(small(), 3, ["0"])


def test_weights_are_read_from_a_file(tmp_path: Path) -> None:
    """The model has the file's values."""
    model = small()
    save_file({name: torch.ones_like(value) for name, value in model.state_dict().items()}, tmp_path / "ones")
    load_weights(model, tmp_path / "ones")
    assert all(bool((value == 1).all()) for value in model.state_dict().values())


@pytest.mark.parametrize("content", [None, b"no safetensors"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    """A missing file and another format."""
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(TaskError, match=f"the weights of this model in the safetensors file {tmp_path}/file: ."):
        load_weights(small(), tmp_path / "file")


def test_the_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    """The first difference is named with both shapes, and the model keeps its values."""
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_file({**before, "2.bias": torch.zeros(9)}, tmp_path / "file")
    with pytest.raises(TaskError, match=r"1 tensors differ: 2.bias has the shape \[2\] here and \[9\] in the file"):
        load_weights(model, tmp_path / "file")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
