"""Runs with secure aggregation, without the masks: several payloads, and client states made of what is summed."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest

import algorithms as fl
from algorithms import tree
from fl_ops.simulate.engine_choice import EngineOptions
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_ops.simulate.simulation import Simulation
from tests.fl_ops.simulate.conftest import Simulated
from tests.marks import slow_except

SIZE = 4
RUN: dict[str, Any] = {
    "round": {"clients_per_round": SIZE, "min_clients": SIZE},
    "simulation": {"partition": {"method": "dirichlet-class", "alpha": 1.0, "seed": 2}},
    "population": SIZE,
    "local": {"learning_rate": 0.1, "epochs": 2},
}
STEPS = {"learning_rate": 0.1, "steps": 5}
SECURE = {"clip": 8.0, "bits": 20}

METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fedcm": ({"name": "fedcm"}, {"min_steps": 2}),
    "fedcm-examples": ({"name": "fedcm", "parameters": {"weights": "examples"}}, {"min_steps": 2, "max_examples": 60}),
    "fedadam": ({"name": "fedadam"}, {"max_examples": 60}),
    "mimelite": ({"name": "mimelite"}, {"clips": {"full_gradient": 8.0}}),
    "mfl": ({"name": "mfl", "parameters": {"weights": "uniform"}}, {"clips": {"client_momentum": 30.0}}),
    "scaffold-I": ({"name": "scaffold", "parameters": {"option": "I"}}, {"clips": {"variate_change": 16.0}}),
    "feddyn": ({"name": "feddyn", "parameters": {"alpha": 0.5}}, {}),
}


def norm(tensors: fl.Tensors) -> float:
    """The L2 norm."""
    return float(tree.norm(tensors))


def done(simulation: Simulation) -> fl.ServerState:
    """The server's state after all rounds, in each of which all clients counted."""
    rounds = list(simulation.rounds())
    assert [len(one.accepted) if hasattr(one.accepted, "__len__") else one.accepted for one in rounds] == [SIZE] * 3
    return simulation.federation.snapshot.state


@pytest.mark.parametrize("method", slow_except(METHODS, "fedcm-examples", "scaffold-I", "feddyn"))
def test_all_sums_are_those_of_the_plain_run_but_for_rounding(simulated: Simulated, method: str) -> None:
    """The clients have unequal steps and examples. The model, and what the server remembers, are close."""
    algorithm, section = METHODS[method]
    with simulated(algorithm=algorithm, **RUN) as simulation:
        plain = done(simulation)
        sizes = {len(task.train) for task in simulation.federation.clients.values()}
        steps = {-(-size // 8) for size in sizes}
        assert len(steps) > 1
    with simulated(algorithm=algorithm, **RUN, secure_aggregation={**SECURE, **section}) as simulation:
        summed = done(simulation)
    for expected, made in [(plain.x, summed.x), *((plain.memory[name], summed.memory[name]) for name in plain.memory)]:
        assert norm(tree.subtract(made, expected)) <= 2e-3 * norm(expected)


@pytest.mark.parametrize(
    ("algorithm", "symbols", "local", "section"),
    [
        ({"name": "scaffold"}, ("c", "c_i"), STEPS, {}),
        (METHODS["scaffold-I"][0], ("c", "c_i"), RUN["local"], METHODS["scaffold-I"][1]),
        ({"name": "feddyn"}, ("h", "h_i"), RUN["local"], {}),
    ],
    ids=["scaffold-II", "scaffold-I", "feddyn"],
)
def test_the_server_has_the_mean_of_the_client_states(
    simulated: Simulated,
    algorithm: dict[str, Any],
    symbols: tuple[str, str],
    local: dict[str, Any],
    section: dict[str, Any],
) -> None:
    """With values of four bits and clipped payloads: a state of the whole delta would be far away from the sum."""
    coarse = {"clip": 0.05, "bits": 4, **section}
    with simulated(algorithm=algorithm, **{**RUN, "local": local}, secure_aggregation=coarse) as simulation:
        state, federation = done(simulation), simulation.federation
        states = [federation.states.get(client) for client in federation.clients]
    of_server, of_client = symbols
    doubles = [tree.map(lambda tensor: tensor.double(), one[of_client]) for one in states if one is not None]
    mean = tree.scale(reduce(tree.add, doubles), 1 / SIZE)
    left = norm(tree.subtract(mean, tree.map(lambda tensor: tensor.double(), state.memory[of_server])))
    assert norm(mean) > 0
    assert left <= 1e-5 * norm(mean)


def test_engines_agree_on_client_states(simulated: Simulated) -> None:
    """With workers, and in lockstep, where clients with rounded states work one after the other."""
    run = {**RUN, "local": STEPS, "secure_aggregation": {**SECURE, "bits": 6}}
    digests = []
    for engine in (EngineOptions(), EngineOptions(workers=2), EngineOptions(batched=BatchedOptions())):
        with simulated(engine, algorithm={"name": "scaffold"}, **run) as simulation:
            digests.append([one.digest for one in simulation.rounds()])
    assert digests[0] == digests[1] == digests[2]
