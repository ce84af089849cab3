"""What the demo trains and with which settings, and where those come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_ops.demo.grid import read_grid

DEFAULT_RATE = 0.1
"""Where neither the grid nor the user says one."""
TUNED_TASK = "digits"
"""The task that the grid was made for."""
COHORT, EPOCHS, BATCH_SIZE, DIRICHLET_ALPHA = 2, 5, 16, 0.1
LAST = 10
"""Rounds at the end that the comparison looks at."""
TARGET = 0.9


@dataclass(frozen=True)
class Method:
    """One algorithm as it will be run. source: where rate and parameters come from, in words."""

    algorithm: str
    learning_rate: float
    parameters: dict[str, Any]
    source: str


@dataclass(frozen=True)
class DemoSettings:
    """What the command line said."""

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
        """Two, where there are two."""
        return min(COHORT, self.clients)

    @property
    def tuned(self) -> bool:
        """Whether the grid speaks of this task."""
        return self.task == TUNED_TASK

    def method(self, algorithm: str) -> Method:
        """How one algorithm is run: by the user's word, else by the grid, else by defaults."""
        chosen = read_grid()["choice"].get(algorithm) if self.tuned else None
        parameters = chosen["parameters"] if chosen else {}
        if self.learning_rate is not None:
            return Method(algorithm, self.learning_rate, parameters, "--learning-rate")
        if chosen:
            return Method(algorithm, chosen["learning_rate"], parameters, "best of its grid")
        return Method(algorithm, DEFAULT_RATE, parameters, "default, not tuned")

    def run(self, method: Method) -> dict[str, Any]:
        """One algorithm's run as its TOML file would have it."""
        return {
            "name": method.algorithm,
            "seed": self.seed,
            "task": {"name": self.task, "options": self.options},
            "algorithm": {"name": method.algorithm, "parameters": method.parameters},
            "local": {"learning_rate": method.learning_rate, "epochs": EPOCHS, "batch_size": BATCH_SIZE},
            # All of them, also for the first draw: cohorts are then a function of the seed alone.
            "round": {"clients_per_round": self.clients_per_round, "min_clients": self.clients},
            "stop": {"rounds": self.rounds},
        }
