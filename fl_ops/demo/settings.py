"""The settings of the demo, and the grid search that chose them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Difference:
    """Accuracy of one algorithm minus another, by seed of the check: mean and worst of the last rounds, shares of 1."""

    means: tuple[float, ...]
    worst: tuple[float, ...]

    @property
    def wins(self) -> int:
        """Number of seeds on which the first algorithm's mean is higher."""
        return sum(difference > 0 for difference in self.means)

    @property
    def average(self) -> float:
        """The average of `means`."""
        return fmean(self.means)


@cache
def read_grid() -> dict[str, Any]:
    """The content of grid.json."""
    content: dict[str, Any] = json.loads(files(__package__).joinpath("grid.json").read_text(encoding="utf-8"))
    return content


def difference(grid: dict[str, Any], first: str, second: str) -> Difference | None:
    """First minus second, seed by seed; None if the check does not have both."""
    by_name = {cell["algorithm"]: cell for cell in grid["check"]["cells"]}
    if first not in by_name or second not in by_name:
        return None
    means, worst = (
        tuple(a - b for a, b in zip(by_name[first][key], by_name[second][key], strict=True))
        for key in ("mean_by_seed", "worst_by_seed")
    )
    return Difference(means, worst)


def at_edge(grid: dict[str, Any], algorithm: str) -> bool:
    """Whether the chosen rate is the lowest or the highest of the search; a better one may be outside."""
    rates = [cell["learning_rate"] for cell in grid["cells"]]
    return grid["choice"][algorithm]["learning_rate"] in (min(rates), max(rates))


DEFAULT_RATE = 0.1
"""The learning rate if neither the grid search nor the user gives one."""
TUNED_TASK = "digits"
"""The task of the grid search."""
COHORT, EPOCHS, BATCH_SIZE, DIRICHLET_ALPHA = 2, 5, 16, 0.1
LAST = 10
"""Number of last rounds that the comparison uses."""
TARGET = 0.9
"""Accuracy whose first round the comparison reports."""


@dataclass(frozen=True)
class Method:
    """One algorithm with its settings. source: the origin of rate and parameters, as text."""

    algorithm: str
    learning_rate: float
    parameters: dict[str, Any]
    source: str


@dataclass(frozen=True)
class DemoSettings:
    """The options of the command line."""

    algorithms: tuple[str, ...] = ("fedcm", "fedavg")
    rounds: int = 40
    clients: int = 8
    task: str = TUNED_TASK
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    learning_rate: float | None = None
    out: Path = Path("demo-out")

    @property
    def clients_per_round(self) -> int:
        """Two clients, or one if there is only one."""
        return min(COHORT, self.clients)

    @property
    def tuned(self) -> bool:
        """Whether the grid search was made for this task."""
        return self.task == TUNED_TASK

    @property
    def own_algorithms(self) -> list[str]:
        """The algorithms that server and daemons must list: those named module:attribute."""
        return [name for name in self.algorithms if ":" in name]

    def method(self, algorithm: str) -> Method:
        """The settings of an algorithm: the user's rate, otherwise those of the grid search, otherwise defaults."""
        chosen = read_grid()["choice"].get(algorithm) if self.tuned else None
        parameters = chosen["parameters"] if chosen else {}
        if self.learning_rate is not None:
            return Method(algorithm, self.learning_rate, parameters, "--learning-rate")
        if chosen:
            return Method(algorithm, chosen["learning_rate"], parameters, "best of its grid")
        return Method(algorithm, DEFAULT_RATE, parameters, "default, not tuned")

    def run(self, method: Method) -> dict[str, Any]:
        """The run of an algorithm, as the content of a run's file."""
        return {
            "name": re.sub(r"[^a-z0-9._-]+", "-", method.algorithm.lower()),
            "seed": self.seed,
            "task": {"name": self.task},
            "algorithm": {"name": method.algorithm, "parameters": method.parameters},
            "local": {"learning_rate": method.learning_rate, "epochs": EPOCHS, "batch_size": BATCH_SIZE},
            # Wait for all clients before the first round: cohorts then depend on the seed only.
            # The clients are of this machine: a model may show their updates.
            "round": {"clients_per_round": self.clients_per_round, "min_clients": self.clients, "min_accepted": 1},
            "stop": {"rounds": self.rounds, "metric": "accuracy"},
        }
