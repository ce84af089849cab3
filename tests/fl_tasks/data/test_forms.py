"""How batches reach the model, the loss and the metrics of a task."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_tasks import Batched, Samples, TaskError
from fl_tasks.data.forms import as_data, forward_of
from fl_tasks.evaluation import evaluate


class Sum(nn.Module):
    """Adds its inputs, however they are passed."""

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        return sum((*inputs, *named.values()), start=torch.zeros(()))


X, Y = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])


@pytest.mark.parametrize(
    ("batch", "output", "target"),
    [
        ((X, Y), X, Y),
        ([X, Y], X, Y),
        ({"a": X, "b": Y}, X + Y, None),
        (UserDict(a=X, b=Y), X + Y, None),
        ((X, Y, X), 2 * X + Y, None),
        ((X,), X, None),
        (X, X, None),
    ],
    ids=["pair", "list", "dict", "mapping", "three", "one", "tensor"],
)
def test_batches_without_a_forward_method(batch: Any, output: Tensor, target: Tensor | None) -> None:
    """A pair is inputs and targets; anything else goes to the model whole, and to the loss whole."""
    came, rest = forward_of(object())(Sum(), batch)
    assert torch.equal(came, output)
    assert rest is batch if target is None else torch.equal(rest, target)


class Own:
    """A task with its own forward pass."""

    version = "1"

    def forward(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = model(batch["x"])
        return output

    def model(self) -> nn.Module:
        return Sum()

    def loss(self, output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return (output - batch["y"]).square().mean()

    def train_data(self, shard: object) -> list[Any]:
        return []

    def eval_data(self, shard: object = None) -> list[Any] | None:
        return None

    def metrics(self, output: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"distance": (output - batch["y"]).abs()}


def test_a_forward_method_is_used_for_every_batch() -> None:
    """The loss and the metrics get the whole batch, also of a pair."""
    task = Own()
    output, target = forward_of(task)(task.model(), {"x": X, "y": Y})
    assert torch.equal(output, X)
    assert target.keys() == {"x", "y"}


ROWS = [{"x": torch.tensor(float(at)), "y": torch.tensor(float(3 * at))} for at in range(5)]


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        Samples(ROWS),
        Batched(lambda seed: [{"x": torch.arange(5.0), "y": 3 * torch.arange(5.0)}], 1, 5),
    ],
    ids=["list", "samples", "batched"],
)
def test_evaluation_over_any_data(data: Any) -> None:
    """The mean distance of 0, 1, ..., 4 to three times itself is 4, whatever the batches are."""
    assert evaluate(Own(), nn.Linear(1, 1).requires_grad_(False) and Sum(), data, 2) == {"distance": 4.0}


def test_an_evaluation_counts_the_examples() -> None:
    """A wrong number stated by the task would be a wrong weight, so it is an error."""
    data = Batched(lambda seed: [{"x": torch.arange(5.0), "y": torch.arange(5.0)}], 1, 6)
    with pytest.raises(TaskError, match="expected 6 examples to evaluate on, as the task states, got 5"):
        evaluate(Own(), Sum(), data)


def test_no_held_out_data_may_be_none() -> None:
    """`eval_data` may return None for a shard without a held-out part."""
    assert len(as_data(Own().eval_data())) == 0
