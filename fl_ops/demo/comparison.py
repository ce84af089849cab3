"""The results side by side: as a table for the terminal, and as the same cells for the page."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from fl_ops import units
from fl_ops.demo.results import Result
from fl_ops.demo.settings import TARGET


def rows(results: Sequence[Result]) -> list[list[str]]:
    """One row for each number, headed by what it is; one column for each algorithm."""
    last = len(results[0].last)
    columns = [cells(result) for result in results]
    names = [
        "Learning rate", "Final accuracy", f"Mean of the last {last} rounds", f"Worst of the last {last} rounds",
        f"Rounds to {units.percent(TARGET, 0)}", "Bytes down", "Bytes up", "Time",
    ]  # fmt: skip
    return [[name, *values] for name, *values in zip(names, *columns, strict=True)]


def cells(result: Result) -> list[str]:
    """One algorithm's column."""
    reached = result.rounds_to_target
    return [
        f"{result.method.learning_rate:g}", units.percent(result.final), units.percent(result.mean_last),
        units.percent(result.worst_last), "never" if reached is None else str(reached),
        units.size(result.bytes_down), units.size(result.bytes_up), units.duration(result.seconds),
    ]  # fmt: skip


def name(result: Result) -> str:
    """FedCM, alpha 0.2: with the parameters that were chosen, not the defaults."""
    return ", ".join([result.title, *(f"{key} {value}" for key, value in result.method.parameters.items())])


def table(results: Sequence[Result]) -> Table:
    """For the terminal."""
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("")
    for result in results:
        drawn.add_column(name(result), justify="right")
    for row in rows(results):
        drawn.add_row(*row)
    return drawn
