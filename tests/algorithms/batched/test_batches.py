"""Batches, random numbers, buffers and optimizers of clients in lockstep, on models that make them matter."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import algorithms as fl
from algorithms.batched.batches import NotBatched, StepBatches, stacked_batches
from algorithms.batched.choice import NAMES, choose
from algorithms.batched.strategies import Name
from algorithms.batched.training import Training
from algorithms.optimizers.federated import with_optimizer
from algorithms.optimizers.spec import OptimizerSpec
from tests.algorithms.batched.clients import Run, Small, clients, difference, make, small_cnn
from tests.marks import slow_except

SETTINGS = fl.LocalSettings(0.1)
FEDAVG = fl.build("fedavg")


def batch_norms() -> nn.Module:
    """A network whose outputs depend on the whole batch."""
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


def dropouts() -> nn.Module:
    """A network that draws random numbers in two places."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(32, 8), nn.Dropout(0.5), nn.Linear(8, 3)
    )


class Mixing(nn.Module):
    """Subtracts the mean over the batch, without a module that shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(36, 3)

    def forward(self, images: Tensor) -> Tensor:
        """[n, 1, 6, 6] -> [n, 3]."""
        flat = images.flatten(1)
        scores: Tensor = self.line(flat - flat.mean(dim=0))
        return scores


def mirrored(images: Tensor) -> Tensor:
    """Each image mirrored with probability 1/2, with torch's default generator."""
    return torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)


def weighted(output: Tensor, target: Tensor) -> Tensor:
    """A mean with weights of the classes: not the mean over examples of a loss of each example."""
    return functional.cross_entropy(output, target, weight=torch.tensor([1.0, 5.0, 0.2], dtype=output.dtype))


def pair(
    model: Callable[[], nn.Module], strategy: Name | None = None, algorithm: fl.Algorithm = FEDAVG, **changes: Any
) -> tuple[Run, Run]:
    """A run one after the other, and one in lockstep with the strategy that `choose` returns."""
    runs = []
    for together in (False, True):
        module, people = make(0, model, torch.float64), clients(**changes)
        chosen = choose(module, people[0].data(), _first(people), _clock(), strategy)
        training = Training(chosen.strategy, chosen.facts, thread_time) if together else None
        runs.append(Run(algorithm, module, people, SETTINGS, training))
    return runs[0], runs[1]


def _first(people: list[Small]) -> StepBatches:
    return stacked_batches([next(iter(client.data().whole)) for client in people])


def _clock() -> Callable[[], float]:
    ticks = iter(range(1000))
    return lambda: float(next(ticks))


def assert_equal(runs: tuple[Run, Run], rounds: int = 2) -> None:
    """The runs agree after some rounds."""
    for run in runs:
        for number in range(rounds):
            run.round(number)
    assert difference(*runs) < 1e-11


@pytest.mark.parametrize("strategy", slow_except(NAMES, "grouped"))
@pytest.mark.parametrize("model", [batch_norms, dropouts, Mixing, small_cnn])
def test_short_batches_random_numbers_and_buffers_are_those_of_a_client_alone(
    model: Callable[[], nn.Module], strategy: Name
) -> None:
    """Batch norms see no filled-in example, running statistics are each client's, dropout masks the client's own."""
    assert_equal(pair(model, strategy))


@pytest.mark.parametrize("method", ["fedsam", "mime"])
@pytest.mark.parametrize("model", [batch_norms, dropouts])
def test_second_passes_repeat_the_random_numbers_and_keep_the_buffers(
    model: Callable[[], nn.Module], method: str
) -> None:
    """SAM's point and Mime's anchor see the dropout masks of the first pass, and running statistics move once."""
    assert_equal(pair(model, "grouped", fl.build(method)))


@pytest.mark.parametrize("model", [dropouts, small_cnn])
def test_augmentation_is_that_of_each_client(model: Callable[[], nn.Module]) -> None:
    """Images are changed with the client's own random numbers, between its dropout masks."""
    assert_equal(pair(model, "grouped", augment=mirrored))


def test_a_loss_that_is_no_mean_over_examples_is_exact() -> None:
    """Filled-in examples enter no loss: class weights are normalised by the real ones."""
    assert_equal(pair(small_cnn, "grouped", loss=weighted))


@pytest.mark.parametrize(
    "spec",
    [
        OptimizerSpec("adamw", {"weight_decay": 0.1}),
        OptimizerSpec("sgd", {"momentum": 0.9}, "device"),
        OptimizerSpec("adam", {}, "device"),
    ],
)
def test_local_optimizers_are_those_of_each_client(spec: OptimizerSpec) -> None:
    """Optimizers of torch step each client's own parameters, and their kept states are each client's."""
    assert_equal(pair(small_cnn, "grouped", with_optimizer(fl.build("fedcm", alpha=0.5), spec, {})))


def test_short_batches_are_filled_only_where_examples_do_not_matter_to_each_other() -> None:
    """Batch norm, a mean over the batch and dropout are noticed from the outputs, not from names of modules."""
    fills = {}
    for model in (small_cnn, batch_norms, dropouts, Mixing):
        module, people = make(0, model, torch.float64), clients()
        fills[model.__name__] = choose(module, people[0].data(), _first(people), _clock()).facts.fills
    assert fills == {"small_cnn": True, "batch_norms": False, "dropouts": False, "Mixing": False}


def test_the_fastest_strategy_is_chosen() -> None:
    """Those for this device are measured in turn; the report has their times."""
    module, people = make(0, small_cnn, torch.float64), clients()
    took = {"grouped": 2.0, "one_by_one": 1.0}
    times = [time for _ in range(4) for seconds in took.values() for time in (0.0, seconds)]
    chosen = choose(module, people[0].data(), _first(people), iter(times).__next__)
    assert (chosen.name, chosen.seconds) == ("one_by_one", took)


def test_what_vmap_cannot_do_is_done_one_by_one() -> None:
    """A loss that reads a number of a tensor cannot be mapped; the choice names the reason."""

    def reading(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target) * (2.0 if output.sum().item() > 1e9 else 1.0)

    module, people = make(0, small_cnn, torch.float64), clients(loss=reading)
    chosen = choose(module, people[0].data(), _first(people), _clock())
    assert chosen.name == "one_by_one"
    assert "item" in chosen.impossible["grouped"]
    assert_equal(pair(small_cnn, loss=reading))


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        ([(torch.zeros(2, 3), ["a", "b"])], "parts that are no tensors"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "other parts or shapes"),
    ],
)
def test_batches_that_are_not_alike_are_refused(batches: list[Any], why: str) -> None:
    """Clients with such batches train one after the other, and the reason is named."""
    with pytest.raises(NotBatched, match=why):
        stacked_batches(batches)
