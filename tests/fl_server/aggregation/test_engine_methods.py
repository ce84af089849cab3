"""The round's data reach the algorithm, and the engine refuses algorithms whose settings are incomplete."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import algorithms as fl
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.methods import local_in
from fl_server.errors import InvalidInput
from fl_server.rounds.sampling import drawn_steps
from fl_server.run_settings.sections import MAX_COUNT
from fl_server.run_settings.spec import from_values
from protos.codec import pack

TASK: Any = SimpleNamespace(model=lambda: nn.Linear(1, 1, bias=False))


def engine(name: str, parameters: Mapping[str, object] | None = None, **sections: Any) -> Engine:
    """An engine for a model of one number."""
    algorithm = {"name": name, "parameters": parameters or {}}
    return Engine(from_values({"task": {"name": "one"}, "algorithm": algorithm, **sections}), TASK)


def moved(engine: Engine, deltas: Sequence[float], folder: Path) -> list[float]:
    """The change of x in each round, with one client that sends these deltas."""
    snapshot, movements = engine.first(), []
    for delta in deltas:
        path = folder / "update"
        path.write_bytes(pack({"weight": torch.tensor([[delta]])}, engine.layout))
        after, _ = engine.server_update(snapshot, [fl.UpdateInfo("a", 1, 1)], [path])
        movements.append((after.state.x["weight"] - snapshot.state.x["weight"]).item())
        snapshot = after
    return movements


def test_planned_rounds_reach_the_algorithm(tmp_path: Path) -> None:
    """FedDemon, beta0 = 0.5, T = 2, deltas 3, 3, 3: beta is 1/3 while v = 0, then 0 in the last round and after it."""
    demon = engine("feddemon", {"beta0": 0.5}, stop={"rounds": 2})
    assert moved(demon, [3.0, 3.0, 3.0], tmp_path) == pytest.approx([3.0, 3.0, 3.0])
    longer = engine("feddemon", {"beta0": 0.5}, stop={"rounds": 4})
    assert moved(longer, [3.0, 3.0], tmp_path) == pytest.approx([3.0, 4.0])
    extended = engine("feddemon", {"beta0": 0.5}, stop={"rounds": 4}, planned_rounds=2)
    assert moved(extended, [3.0, 3.0, 3.0], tmp_path) == pytest.approx([3.0, 3.0, 3.0])


def test_decay_of_the_rate_reaches_the_algorithm(tmp_path: Path) -> None:
    """beta = 0.5, deltas 4 and 1, rate halved: v = 4, then 0.5 * (4 / 2) + 1 = 2 in units of a gradient, else 3."""
    local = {"learning_rate_decay": 0.5}
    for units, second in (("gradient", 2.0), ("parameter", 3.0)):
        parameters = {"beta": 0.5, "variant": "heavy_ball", "momentum_units": units}
        assert moved(engine("fedavgm", parameters, local=local), [4.0, 1.0], tmp_path) == pytest.approx([4.0, second])


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_an_algorithm_that_needs_the_population_requires_it(name: str) -> None:
    """N must be set, and at least the number of clients per round."""
    with pytest.raises(InvalidInput, match=f"population: expected N, .*2 or more: {name} needs it, got 1"):
        engine(name, population=1)
    assert engine(name, population=2).algorithm.name == name


def test_a_weighted_objective_requires_population_examples() -> None:
    """omega_i = N n_i / sum n."""
    with pytest.raises(InvalidInput, match="population_examples: expected the examples of all clients together"):
        engine("scaffold", {"objective": "examples"}, population=2)
    weighted = engine("scaffold", {"objective": "examples"}, population=2, population_examples=10)
    assert weighted.algorithm.objective == "examples"


def test_schedules_reach_the_server_step(tmp_path: Path) -> None:
    """eta_g 1 to 0.5 over three planned rounds of five: the movements of equal deltas; the last value stays."""
    algorithm = {"name": "fedavg", "schedules": {"eta_g": {"kind": "linear", "end": 0.5}}}
    run = from_values({"task": {"name": "one"}, "algorithm": algorithm, "stop": {"rounds": 5}, "planned_rounds": 3})
    assert moved(Engine(run, TASK), [4.0] * 5, tmp_path) == pytest.approx([4.0, 3.0, 2.0, 2.0, 2.0])


def test_schedules_reach_the_direction_of_a_later_exchange() -> None:
    """Mime sends (1 - beta) cbar + beta m with the round's beta: 0.5 in round 0, 0 in the last one. cbar = 6, m = 0."""
    algorithm = {"name": "mime", "parameters": {"beta": 0.5}, "schedules": {"beta": {"kind": "linear", "end": 0.0}}}
    mime = Engine(from_values({"task": {"name": "one"}, "algorithm": algorithm, "stop": {"rounds": 2}}), TASK)
    first, sums = mime.first(), {"cbar": {"weight": torch.tensor([[6.0]])}}
    sent = [mime.outgoing(replace(first, round=t - 1), 1, sums)[1].tensors["weight"].item() for t in (0, 1)]
    assert sent == [3.0, 6.0]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"alpha": {"kind": "cosine"}}, "schedules.alpha: end: expected a value with kind = 'cosine', got none"),
        (
            {"alpha": {"kind": "cosine", "end": 0}},
            "schedules.alpha: fedcm, parameter 'alpha': expected a number over 0",
        ),
        ({"weights": {"kind": "constant"}}, "schedules.weights: fedcm, parameter 'weights': expected a schedule for"),
        ({"eta": {"kind": "constant"}}, "schedules.eta: unknown parameter of fedcm: 'eta'. Did you mean 'eta_g'"),
    ],
)
def test_schedules_that_cannot_be_are_refused_before_round_0(schedule: dict[str, Any], message: str) -> None:
    """The message has the path of the schedule."""
    run = from_values({"task": {"name": "one"}, "algorithm": {"name": "fedcm", "schedules": schedule}})
    with pytest.raises(fl.AlgorithmError, match=message):
        Engine(run, TASK)


ALL_CLIENTS: dict[str, Any] = {"clients_per_round": 3, "quorum": 3}


@pytest.mark.parametrize(
    ("section", "changed", "message"),
    [
        ("round", {"sampling": "bernoulli"}, "round.sampling: expected 'fixed', for all clients take part in each"),
        ("round", {"clients_per_round": 2, "quorum": 2}, "round.clients_per_round: expected 3, for all .*, got 2"),
        ("round", {"close": "goal"}, "round.close: expected 'cohort', for all clients"),
        ("round", {"quorum": None}, "round.quorum: expected 3, for all clients .* of proxskip, got None"),
        ("local", {"steps": 5}, "local.steps: expected none with proxskip, which draws the steps .*, got 5"),
        ("local", {"epochs": 2}, "local.epochs: expected none with proxskip, .*, got 2"),
    ],
)
def test_random_skipping_needs_all_clients_and_no_steps(section: str, changed: dict[str, Any], message: str) -> None:
    """A run that could close a round without some client, or that orders steps, is refused with the key to change."""
    sections: dict[str, Any] = {"round": ALL_CLIENTS, "population": 3, "local": {}}
    assert engine("proxskip", **sections).algorithm.skipping == 0.1
    with pytest.raises(InvalidInput, match=message):
        engine("proxskip", **{**sections, section: {**sections[section], **changed}})


def test_every_round_of_skipping_has_its_own_steps() -> None:
    """The ordered steps are those drawn from seed and round; methods without skipping keep the run's own."""
    skipping = engine("proxskip", {"p": 0.2}, round=ALL_CLIENTS, population=3)
    ordered = [local_in(skipping.config, skipping.algorithm, round_) for round_ in range(20)]
    assert [(local.steps, local.epochs) for local in ordered] == [
        (drawn_steps(0.2, 0, round_, MAX_COUNT), None) for round_ in range(20)
    ]
    plain = engine("scaffold", population=3)
    assert local_in(plain.config, plain.algorithm, 4) == plain.config.local
