"""The engine: what it tells a method about the round, and which methods it does not take."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import algorithms as fl
from fl_server.engine import Engine
from fl_server.errors import InvalidInput
from fl_server.run_config import from_values
from protos.codec import pack

TASK = SimpleNamespace(model=lambda: nn.Linear(1, 1, bias=False))


def engine(name, parameters=None, **sections):
    """An engine for a model of one number."""
    algorithm = {"name": name, "parameters": parameters or {}}
    return Engine(from_values({"task": {"name": "one"}, "algorithm": algorithm, **sections}), TASK)


def moved(engine, deltas, folder):
    """By how much x moves in each of some rounds with one client of known deltas."""
    snapshot, movements = engine.first(), []
    for delta in deltas:
        path = folder / "update"
        path.write_bytes(pack({"weight": torch.tensor([[delta]])}, engine.layout))
        after, _ = engine.step(snapshot, [fl.UpdateInfo("a", 1, 1)], [path])
        movements.append((after.state.x["weight"] - snapshot.state.x["weight"]).item())
        snapshot = after
    return movements


def test_planned_rounds_reach_the_method(tmp_path):
    """FedDemon, beta0 = 0.5, T = 2, deltas 3, 3, 3: beta is 1/3 while v = 0, then 0 in the last round and after it."""
    demon = engine("feddemon", {"beta0": 0.5}, stop={"rounds": 2})
    assert moved(demon, [3.0, 3.0, 3.0], tmp_path) == pytest.approx([3.0, 3.0, 3.0])
    longer = engine("feddemon", {"beta0": 0.5}, stop={"rounds": 4})
    assert moved(longer, [3.0, 3.0], tmp_path) == pytest.approx([3.0, 4.0])
    extended = engine("feddemon", {"beta0": 0.5}, stop={"rounds": 4}, planned_rounds=2)
    assert moved(extended, [3.0, 3.0, 3.0], tmp_path) == pytest.approx([3.0, 3.0, 3.0])


def test_decay_of_the_rate_reaches_the_method(tmp_path):
    """beta = 0.5, deltas 4 and 1, rate halved: v = 4, then 0.5 * (4 / 2) + 1 = 2 in units of a gradient, else 3."""
    local = {"learning_rate_decay": 0.5}
    for units, second in (("gradient", 2.0), ("parameter", 3.0)):
        parameters = {"beta": 0.5, "variant": "heavy_ball", "momentum_units": units}
        assert moved(engine("fedavgm", parameters, local=local), [4.0, 1.0], tmp_path) == pytest.approx([4.0, second])


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_a_method_that_needs_the_population_is_told_it(name):
    """N must be there, and as many as are drawn."""
    with pytest.raises(InvalidInput, match=f"population: expected N, .*2 or more: {name} needs it, got 1"):
        engine(name, population=1)
    assert engine(name, population=2).algorithm.name == name


def test_a_weighted_objective_wants_the_examples_of_all():
    """omega_i = N n_i / sum n."""
    with pytest.raises(InvalidInput, match="population_examples: expected the examples of all clients together"):
        engine("scaffold", {"objective": "examples"}, population=2)
    weighted = engine("scaffold", {"objective": "examples"}, population=2, population_examples=10)
    assert weighted.algorithm.objective == "examples"
