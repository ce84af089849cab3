"""Components that are joined: any correction with any server optimizer, kept apart."""

from __future__ import annotations

import pytest
import torch

import algorithms as fl
from algorithms import tree
from algorithms.compose import Components, ServerOptimizer, compose
from algorithms.conformance.federation import Federation
from algorithms.methods.fedavg import sgd
from algorithms.methods.fedcm import client_momentum


def heavy_ball(symbol: str = "v") -> ServerOptimizer:
    """A server optimizer with memory: v <- v / 2 + movement, x <- x + v."""

    def step(
        x: fl.Tensors, memory: fl.Memory, movement: fl.Tensors, round_info: fl.RoundInfo
    ) -> tuple[fl.Tensors, fl.Memory]:
        v = tree.add(movement, memory[symbol], 0.5)
        return tree.add(x, v), {symbol: v}

    return ServerOptimizer(step, memory={symbol: 0.0})


def test_server_memory_does_not_leak_into_the_correction(federation: Federation) -> None:
    """FedCM's Delta is made from the deltas: for equal deltas it is the same under SGD and under a heavy ball."""
    plain, heavy = (
        compose("fedcm", {}, Components(client_momentum(0.5), "uniform", optimizer))
        for optimizer in (sgd(1.0), heavy_ball())
    )
    start = fl.ServerState(federation.x, {symbol: tree.full_like(federation.x, 1.0) for symbol in ("Delta", "v")})
    updates = federation.deltas(plain, start)
    after = [fl.apply_updates(method, start, updates, federation.round_info()) for method in (plain, heavy)]
    assert torch.equal(after[0].memory["Delta"]["head"], after[1].memory["Delta"]["head"])
    torch.testing.assert_close(after[1].x["head"] - after[0].x["head"], torch.full((2,), 0.5, dtype=torch.float64))


def test_state_holds_the_memory_of_both_parts(federation: Federation) -> None:
    """A checkpoint of a composed method has each part's symbols, from their starting values on."""
    both = compose("fedcm", {}, Components(client_momentum(0.5), "uniform", heavy_ball()))
    assert both.init(federation.x).memory.keys() == {"Delta", "v"}
    assert federation.play(both, 1)[0].memory.keys() == {"Delta", "v"}


def test_parts_with_one_symbol_between_them_do_not_fit() -> None:
    """Two parts that keep different things under one name are refused when they are joined, not in round 40."""
    with pytest.raises(fl.AlgorithmError, match=r"got \['Delta'\] in both"):
        compose("both", {}, Components(client_momentum(0.5), "uniform", heavy_ball("Delta")))


def test_sums_of_another_model_are_refused(federation: Federation) -> None:
    """A sum of a shape that torch would broadcast does not reach the model."""
    fedavg = fl.build("fedavg")
    wrong = {"Dbar": {**federation.x, "head": torch.zeros(1, dtype=torch.float64)}}
    with pytest.raises(ValueError, match=r"sum 'Dbar', tensor 'head': expected float64\[2\], got float64\[1\]"):
        fedavg.server_step(fedavg.init(federation.x), wrong, federation.round_info())


def test_model_without_trainable_parameters_is_refused() -> None:
    """A model without trainable parameters is refused before round 0."""
    with pytest.raises(fl.AlgorithmError, match="expected a model with trainable parameters, got none"):
        fl.build("fedavg").init({})


@pytest.mark.parametrize(("t", "rate"), [(-1, 0.1), (0, 0.0), (0, float("nan"))])
def test_round_without_a_rate_is_refused(t: int, rate: float) -> None:
    """Normalising by the rate needs one over 0."""
    with pytest.raises(ValueError, match="expected a round counted from 0 and a learning rate over 0"):
        fl.RoundInfo(t, rate)
