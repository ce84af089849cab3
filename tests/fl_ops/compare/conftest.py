"""Table files in a few lines, and runs that are not run: accuracies by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fl_ops.compare.cells import CellResult, RoundRow
from fl_ops.compare.table import Table, read_table

TABLE = """
seeds = [1, 2]
task = { name = "digits" }
simulation = { clients = 4 }
local = { learning_rate = 0.1 }
stop = { rounds = 3 }
splits = { even = { method = "iid" } }
report = { target = 0.5, last = 2 }
tuning = { seed = 9, learning_rates = [0.1, 0.2, 0.4], rounds = 2, extend = 0 }

[[methods]]
label = "FedAvg"
name = "fedavg"

[[methods]]
label = "FedCM"
name = "fedcm"
tune = { alpha = [0.1, 0.3] }
"""

Read = Callable[..., Table]
Reached = Callable[..., CellResult]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The table above, with some of its text replaced."""

    def make(*changes: tuple[str, str]) -> Table:
        text = TABLE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "small.toml"
        path.write_text(text)
        return read_table(path)

    return make


@pytest.fixture
def reached() -> Reached:
    """A run with an evaluation after every round: 2 MB down, 1 MB up and 10 s of simulated time in each."""

    def make(*accuracies: float, diverged: int | None = None) -> CellResult:
        rounds = tuple(
            RoundRow(number, 2, 1.0, accuracy, 1.0, 2_000_000, 1_000_000, 0.5, "", 10.0 * (number + 1))
            for number, accuracy in enumerate(accuracies)
        )
        return CellResult(rounds, 1.0, diverged)

    return make
