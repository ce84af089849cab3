"""Both objectives end at their exact minimum with clients of unequal sizes, for the methods that promise it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_ops.simulate.clients import SimulatedClients
from fl_ops.simulate.simulation import Simulation
from fl_server.run_settings.config import RunConfig
from fl_tasks import Shard
from tests.processes.process import HERE
from tests.processes.quadratic_task import EXAMPLES, Quadratic

TASK = "quadratic_task:Quadratic"
PARTS = dict(zip("abc", torch.arange(EXAMPLES).split([2, 5, 17]), strict=True))
METHODS: dict[str, dict[str, Any]] = {"scaffold": {}, "feddyn": {"alpha": 1.0}}


@pytest.fixture(autouse=True)
def _task_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the task of the quadratics importable."""
    monkeypatch.syspath_prepend(HERE)


def optimum(objective: str) -> torch.Tensor:
    """The minimum of the mean of the f_i over clients, or over their examples."""
    a, b = Quadratic().train_data(Shard()).targets.unbind(dim=1)
    total_a, total_ab = torch.zeros(2, a.shape[1], dtype=torch.float64)
    for part in PARTS.values():
        weight = len(part) if objective == "examples" else 1.0
        total_a += weight * a[part].mean(dim=0)
        total_ab += weight * (a * b)[part].mean(dim=0)
    best: torch.Tensor = total_ab / total_a
    return best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "objective"),
    [
        ("scaffold", "examples"),
        ("feddyn", "uniform"),
        pytest.param("scaffold", "uniform", marks=pytest.mark.slow),
        pytest.param("feddyn", "examples", marks=pytest.mark.slow),
    ],
)
def test_unequal_clients_end_at_the_minimum_of_the_objective(method: str, objective: str) -> None:
    """The sum of the examples is given for both objectives; only the weighted one uses it."""
    parameters = {**METHODS[method], "objective": objective}
    config = RunConfig.model_validate(
        {
            "name": "r",
            "task": {"name": TASK},
            "algorithm": {"name": method, "parameters": parameters},
            "population": 3,
            "population_examples": EXAMPLES,
            "local": {"epochs": 8, "batch_size": EXAMPLES, "learning_rate": 0.1},
            "round": {"clients_per_round": 2},
            "evaluation": {"every": 0},
            "stop": {"rounds": 150},
            "seed": 3,
        }
    )
    with Simulation(config, SimulatedClients(TASK, Quadratic(), PARTS)) as simulation:
        for _ in simulation.rounds():
            pass
        distance = torch.linalg.vector_norm(simulation.model()["y"] - optimum(objective))
    assert float(distance) < 1e-10
