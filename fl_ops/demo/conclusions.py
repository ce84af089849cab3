"""Sentences on the difference between two runs: its size, its reliability, and the difference on other seeds.

Every sentence follows from measured numbers, whichever algorithm is better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fl_common.units import percent
from fl_ops.demo.grid_search import Difference, at_edge, difference, read_grid
from fl_ops.demo.results import Demo, Result, title
from fl_ops.demo.settings import BATCH_SIZE, EPOCHS, DemoSettings


def sentences(demo: Demo) -> list[str]:
    """The difference of the first two algorithms, and its reliability. Empty for a single algorithm."""
    return list(_sentences(demo)) if len(demo.results) > 1 else []


def _sentences(demo: Demo) -> Iterator[str]:
    first, second = demo.results[:2]
    yield _gap(first, second, demo.data.evaluation_examples)
    yield "The seed decides the data partition, the first model, the cohorts and the batches: one run is one sample."
    settings, grid = demo.settings, read_grid()
    if not settings.tuned:
        yield f"Rates and parameters were not tuned for {settings.task}: the result hardly shows which one is better."
        return
    other = difference(grid, first.method.algorithm, second.method.algorithm)
    if other is not None:
        yield _on_other_seeds(other, f"{first.title} minus {second.title}", grid)
    yield from _caveats(settings, [first, second], grid)


def _gap(first: Result, second: Result, examples: int) -> str:
    gap, count = first.mean_last - second.mean_last, len(first.last)
    ahead, behind = (first, second) if gap >= 0 else (second, first)
    size = f"{abs(100 * gap):.1f} points, or {abs(gap) * examples:.1f} of {examples} examples"
    mean = (
        f"Over the last {count} rounds the mean accuracy of {ahead.title} is {size}, above that of {behind.title}"
        if gap
        else f"Over the last {count} rounds {first.title} and {second.title} have the same mean accuracy"
    )
    worst = " and ".join(f"{percent(one.worst_last)} for {one.title}" for one in (first, second))
    return f"{mean}; the worst of these rounds is {worst}."


def _on_other_seeds(other: Difference, what: str, grid: dict[str, Any]) -> str:
    seeds, average = grid["check"]["seeds"], other.average
    worst = sum(other.worst) / len(other.worst)
    return (
        f"On {len(seeds)} other seeds ({seeds[0]} to {seeds[-1]}, simulated with the chosen settings), {what} "
        f"in the mean of the last {grid['setup']['last']} rounds was {_points(average)} on average, from "
        f"{_points(min(other.means))} to {_points(max(other.means))}, and above zero on {other.wins} of {len(seeds)}; "
        f"in the worst of these rounds it was {_points(worst)} on average."
    )


def _caveats(settings: DemoSettings, results: Sequence[Result], grid: dict[str, Any]) -> Iterator[str]:
    chosen = [result for result in results if result.method.algorithm in grid["choice"]]
    tried = [sum(cell["algorithm"] == one.method.algorithm for cell in grid["cells"]) for one in chosen]
    if len(set(tried)) > 1:
        counts = ", ".join(f"{one.title} {count}" for one, count in zip(chosen, tried, strict=True))
        yield f"The search tried the same rates for every algorithm; with its own parameters, cells tried: {counts}."
    if edges := [title(one.method.algorithm) for one in chosen if at_edge(grid, one.method.algorithm)]:
        yield f"The rate chosen for {' and '.join(edges)} is the lowest or highest tried: a better one may be outside."
    if settings.seed in (*grid["seeds"], *grid["check"]["seeds"]):
        yield f"Seed {settings.seed} was used in the grid search or its check: it is no new evidence."
    if settings.learning_rate is not None:
        yield f"The rate {settings.learning_rate:g} was given by --learning-rate; the grid search did not choose it."
    if _setup(settings) != {key: grid["setup"][key] for key in _setup(settings)}:
        yield "The grid search used another number of rounds or clients: its choice may not fit this run."


def _setup(settings: DemoSettings) -> dict[str, Any]:
    return {
        "clients": settings.clients,
        "rounds": settings.rounds,
        "clients_per_round": settings.clients_per_round,
        "epochs": EPOCHS,
        "batch_size": BATCH_SIZE,
    }


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points"
