"""Lower precision and another memory format change the computation, not the learned result or the payloads."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import algorithms as fl
from fl_client.settings.device import Compute
from fl_tasks import Examples, Shard
from fl_tasks.batches import batches, seed_everything
from fl_tasks.built_in.digits import Digits
from fl_tasks.evaluation import evaluate
from tests.marks import slow_except

CPU = torch.device("cpu")
IMAGES = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def digits() -> tuple[Digits, Examples]:
    """The task of the demo, and its training images."""
    task = Digits()
    return task, task.train_data(Shard())[:300]


def trained(
    digits: tuple[Digits, Examples], method: str = "fedavg", **compute: Any
) -> tuple[nn.Module, fl.ClientUpdate]:
    """The model after two epochs, and the result."""
    task, examples = digits
    seed_everything(1)
    model = Compute(**compute).prepared(task.model(), CPU)
    algorithm = fl.build(method)
    sent = fl.tree.map(lambda tensor: 0.01 * torch.randn(tensor.shape), fl.read_state(model).trainable)
    context = fl.ClientContext(sent, dict.fromkeys(algorithm.client_init(sent), sent))
    data = fl.LocalData(batches(examples, 20, 1, epochs=2), (), task.loss)
    return model, fl.answer(model, data, fl.Work(algorithm, context, fl.LocalSettings(0.1)))


def test_bfloat16_learns_nearly_the_same(digits: tuple[Digits, Examples]) -> None:
    """The loss is within 3 % of float32's and not equal. The update is float32, and evaluation works."""
    (plain, expected), (model, update) = trained(digits), trained(digits, precision="bfloat16")
    assert expected.loss != update.loss
    assert update.loss == pytest.approx(expected.loss, rel=0.03)
    assert {tensor.dtype for tensor in update.payloads["delta"].values()} == {torch.float32}
    task, examples = digits
    accuracies = [evaluate(task, trained, examples)["accuracy"] for trained in (plain, model)]
    assert accuracies[1] == pytest.approx(accuracies[0], abs=0.03)


@pytest.mark.parametrize("method", slow_except(["fedavg", "fedcm", "feddyn", "mofedsam"], "feddyn", "mofedsam"))
def test_channels_last_gives_the_same_update(digits: tuple[Digits, Examples], method: str) -> None:
    """The updates are equal up to rounding after thirty steps, for every kind of rule, and have the plain order."""
    plain, other = (
        trained(digits, method, memory_format=order)[1].payloads["delta"] for order in ("contiguous", "channels_last")
    )
    assert fl.tree.norm(fl.tree.subtract(other, plain)) < 1e-4 * fl.tree.norm(plain)


def test_channels_last_reaches_inputs_and_weights() -> None:
    """The convolution gets both in that order."""
    model, seen = nn.Conv2d(2, 3, 3), []
    Compute(memory_format="channels_last").prepared(model, CPU)
    model.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(torch.randn(2, 2, 8, 8))
    for tensor in (model.weight, *seen):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()


def test_output_is_float32_again() -> None:
    """The loss uses float32 numbers with the precision of bfloat16."""
    model = nn.Linear(8, 3)
    expected = model(IMAGES[:, 0, 0])
    output = Compute(precision="bfloat16").prepared(model, CPU)(IMAGES[:, 0, 0])
    assert output.dtype == torch.float32
    assert not torch.equal(output, expected)
    torch.testing.assert_close(output, expected, rtol=0.05, atol=0.02)


def test_defaults_change_nothing_on_a_cpu() -> None:
    """There is no hook, no other order and no other forward pass, so the bits of a CPU stay."""
    model = nn.Conv2d(1, 2, 3)
    as_it_was = deepcopy(model)
    assert Compute().prepared(model, CPU) is model
    assert model.__dict__.keys() == as_it_was.__dict__.keys()
    assert not model._forward_pre_hooks
    assert torch.equal(model(IMAGES), as_it_was(IMAGES))
