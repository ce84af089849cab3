"""Every method in lockstep: its round is that of the clients one after the other, up to the rounding of sums."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from time import thread_time
from typing import Any

import pytest
import torch
from torch.nn import functional

import algorithms as fl
from algorithms.batched.choice import NAMES, Facts, make_strategy
from algorithms.batched.strategies import Holder, Name, Strategy
from algorithms.batched.training import Training
from algorithms.batches import forward_pair
from algorithms.optimizers.spec import RateSchedule
from tests.algorithms.batched.clients import Run, clients, difference, make, small_cnn
from tests.algorithms.test_conformance import ROWS
from tests.marks import slow_except

TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.float64: 1e-12}
"""Largest relative distance of a model, a state or a payload, in the norm over all its tensors."""
SHORT = ("fedavg", "scaffold-I", "feddyn-examples", "mime", "fedsam-tensor", "fedsam-p", "fedrobust", "mfl", "fedadam")
"""The rows of `make test`: one of each kind of correction, of gradient, of payload and of server step."""
FULL = fl.LocalSettings(0.1, weight_decay=0.01, max_gradient_norm=0.5, schedule=RateSchedule("cosine", 0.2))


def strategy_of(name: Name, model: torch.nn.Module, *, fill: bool = True) -> Strategy:
    """A strategy for a model of cross entropy."""
    return make_strategy(name, Holder(model, forward_pair), functional.cross_entropy, fills=fill)


def both(label: str, dtype: torch.dtype, strategy: Name, settings: fl.LocalSettings, *, fill: bool = True) -> list[Run]:
    """A method's run with the clients one after the other, and the same in lockstep."""
    name, parameters = ROWS[label]
    algorithm, runs = fl.build(name, **parameters), []
    for together in (False, True):
        model = make(0, small_cnn, dtype)
        training = training_of(strategy_of(strategy, model, fill=fill)) if together else None
        runs.append(Run(algorithm, model, clients(dtype), settings, training))
    return runs


def training_of(strategy: Strategy, *, means: bool = True) -> Training:
    """For a model whose examples are independent, or are not."""
    return Training(strategy, Facts(False, means, means), thread_time)


@pytest.mark.parametrize(
    ("label", "dtype"),
    slow_except(product(ROWS, TOLERANCE), ("fedavg", torch.float32), *((label, torch.float64) for label in SHORT)),
)
def test_a_round_is_that_of_clients_one_after_the_other(label: str, dtype: torch.dtype) -> None:
    """Clients of 2 to 8 steps with short batches, all exchanges, client states, clipping, decay and a schedule."""
    alone, together = both(label, dtype, "grouped", FULL)
    for run in (alone, together):
        run.round(0)
    assert difference(alone, together) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("label", slow_except(ROWS, *SHORT))
def test_three_rounds_in_float64(label: str) -> None:
    """Client states and server memory that are not zero any more, without clipping and decay."""
    alone, together = both(label, torch.float64, "grouped", fl.LocalSettings(0.05))
    for number in range(3):
        alone.round(number)
        together.round(number)
    assert difference(alone, together) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
    "label", ["fedavg", "scaffold-I", "feddyn-examples", "mime", "fedsam-tensor", "fedrobust", "mfl"]
)
@pytest.mark.parametrize(("strategy", "fill"), [("grouped", False), ("grouped", True), ("one_by_one", False)])
def test_every_strategy_has_the_same_round(label: str, strategy: Name, fill: bool) -> None:
    """Short batches by size and filled ones, and one client after the other."""
    alone, together = both(label, torch.float64, strategy, FULL, fill=fill)
    for run in (alone, together):
        run.round(0)
    assert difference(alone, together) < 1e-12


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("label", ["scaffold-I", "mofedsam"])
def test_the_same_group_has_the_same_bits_twice(label: str, strategy: Name) -> None:
    """Two runs with equal groups and one strategy agree in every bit."""
    name, parameters = ROWS[label]
    found: list[dict[str, Any]] = []
    for _ in range(2):
        model = make(0, small_cnn, torch.float32)
        training = training_of(strategy_of(strategy, model))
        run = Run(fl.build(name, **parameters), model, clients(torch.float32), FULL, training)
        run.round(0)
        found.append(run.values())
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_clients_alone_and_in_lockstep_differ_where_they_should() -> None:
    """The comparison can fail: another learning rate gives another round."""
    alone, together = both("fedavg", torch.float64, "grouped", FULL)
    together.settings = fl.LocalSettings(0.11)
    for run in (alone, together):
        run.round(0)
    assert difference(alone, together) > 1e-3
