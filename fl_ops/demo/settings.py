"""The settings of the demo, and the grid search that chose them: grid.json has its cells, choice and check.

`python -m benchmarks.demo_grid` writes grid.json.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from operator import sub
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

DEFAULT_RATE = 0.1
"""The learning rate if neither the grid search nor the user gives one."""
TUNED_TASK = "digits"
"""The task of the grid search."""
COHORT, STEPS, BATCH_SIZE, DIRICHLET_ALPHA = 4, 10, 16, 0.1
METRIC = "accuracy"
METRICS = {"averaged": f"averaged_{METRIC}", "latest": METRIC}
"""Model -> the metric of its accuracy. The comparison is by the first."""
EXAGGERATING, FAILING = "exaggerating", "failing"
"""The ids of the faulty clients."""
LAST = 5
"""Number of last rounds that the comparison uses."""
TARGET = 0.9
"""Accuracy whose first round the comparison reports."""


_TITLES = {"fedavg": "FedAvg", "fedcm": "FedCM"}


def title(algorithm: str) -> str:
    """An algorithm's name as written in papers."""
    return _TITLES.get(algorithm, algorithm)


@dataclass(frozen=True)
class Difference:
    """Accuracy of one algorithm minus another, by seed of the check: means of the last rounds, shares of 1."""

    means: tuple[float, ...]

    @property
    def wins(self) -> int:
        """Number of seeds on which the first algorithm's mean is higher."""
        return sum(difference > 0 for difference in self.means)

    @property
    def average(self) -> float:
        """The average of `means`."""
        return fmean(self.means)

    @property
    def standard_error(self) -> float:
        """The standard error of the average."""
        return stdev(self.means) / math.sqrt(len(self.means))


@cache
def read_grid() -> dict[str, Any]:
    """The content of grid.json."""
    content: dict[str, Any] = json.loads(files(__package__).joinpath("grid.json").read_text(encoding="utf-8"))
    return content


def differences(grid: dict[str, Any], first: str, second: str) -> dict[str, Difference]:
    """First minus second for each model, averaged and latest, seed by seed; empty if the check does not have both."""
    by_name = {cell["algorithm"]: cell for cell in grid["check"]["cells"]}
    if first not in by_name or second not in by_name:
        return {}
    means = {
        model: map(sub, by_name[first][model]["mean_by_seed"], by_name[second][model]["mean_by_seed"])
        for model in METRICS
    }
    return {model: Difference(tuple(of_model)) for model, of_model in means.items()}


def at_edge(grid: dict[str, Any], algorithm: str) -> bool:
    """Whether a chosen value is the lowest or highest of those tried; a better one may be outside."""
    tried = [_numbers(cell) for cell in grid["cells"] if cell["algorithm"] == algorithm]
    chosen = _numbers(grid["choice"][algorithm])
    return any(
        value in (min(cell[key] for cell in tried), max(cell[key] for cell in tried)) for key, value in chosen.items()
    )


def _numbers(cell: dict[str, Any]) -> dict[str, float]:
    return {"learning_rate": cell["learning_rate"], "norm": cell["max_gradient_norm"], **cell["parameters"]}


@dataclass(frozen=True)
class Method:
    """One algorithm with its settings.

    max_gradient_norm: of each local step; 0 is no clipping; source: the origin of the settings, as text.
    """

    algorithm: str
    learning_rate: float
    parameters: dict[str, Any]
    max_gradient_norm: float = 0.0
    source: str = ""


@dataclass(frozen=True)
class DemoSettings:
    """The options of the command line."""

    algorithms: tuple[str, ...] = ("fedcm", "fedavg")
    rounds: int = 20
    clients: int = 20
    task: str = TUNED_TASK
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    learning_rate: float | None = None
    out: Path = Path("demo-out")

    @property
    def clients_per_round(self) -> int:
        """Four clients, or all if there are fewer."""
        return min(COHORT, self.clients)

    @property
    def tuned(self) -> bool:
        """Whether the grid search was made for this task."""
        return self.task == TUNED_TASK

    @property
    def averaging(self) -> dict[str, Any]:
        """How models are averaged, the same for every algorithm."""
        return {"method": "ema", "decay": read_grid()["decay"]}

    @property
    def own_algorithms(self) -> list[str]:
        """The algorithms that server and daemons must list: those named module:attribute."""
        return [name for name in self.algorithms if ":" in name]

    def method(self, algorithm: str) -> Method:
        """The settings of an algorithm: the user's rate, otherwise those of the grid search, otherwise defaults."""
        chosen = read_grid()["choice"].get(algorithm) if self.tuned else None
        method = Method(algorithm, source="best of its grid", **chosen) if chosen else _untuned(algorithm)
        if self.learning_rate is None:
            return method
        return replace(method, learning_rate=self.learning_rate, source="--learning-rate")

    def run(self, method: Method) -> dict[str, Any]:
        """The run of an algorithm, as the content of a run's file."""
        return {
            "name": re.sub(r"[^a-z0-9._-]+", "-", method.algorithm.lower()),
            "seed": self.seed,
            "task": {"name": self.task},
            "algorithm": {"name": method.algorithm, "parameters": method.parameters},
            "local": {
                "learning_rate": method.learning_rate,
                "max_gradient_norm": method.max_gradient_norm,
                "steps": STEPS,
                "batch_size": BATCH_SIZE,
            },
            "averaging": self.averaging,
            # Wait for all clients before the first round: cohorts then depend on the seed only.
            # The clients are of this machine: a model may show their updates.
            "round": {"clients_per_round": self.clients_per_round, "min_clients": self.clients, "min_accepted": 1},
            "stop": {"rounds": self.rounds, "metric": METRICS["averaged"]},
        }


def _untuned(algorithm: str) -> Method:
    return Method(algorithm, DEFAULT_RATE, {}, source="default, not tuned")
