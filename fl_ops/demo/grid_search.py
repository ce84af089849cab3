"""Reads grid.json, the grid search that chose the demo's settings: cells, choice, and a check on other seeds.

`python -m benchmarks.demo_grid` writes the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
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
