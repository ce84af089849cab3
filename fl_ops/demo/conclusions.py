"""Sentences on the difference between two runs: its size, its reliability, and the difference on other seeds.

Every sentence follows from measured numbers, whichever algorithm is better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fl_common.units import percent
from fl_ops.demo.results import Demo, Result
from fl_ops.demo.settings import BATCH_SIZE, STEPS, DemoSettings, Difference, at_edge, differences, read_grid, title


def sentences(demo: Demo) -> list[str]:
    """The difference of the first two algorithms, and its reliability. Empty for a single algorithm."""
    return list(_sentences(demo)) if len(demo.results) > 1 else []


def _sentences(demo: Demo) -> Iterator[str]:
    first, second = demo.results[:2]
    yield _gap(first, second, demo.data.evaluation_examples)
    yield f"With the latest models the mean accuracy is {_of_each('mean_last', 'latest', first, second)}."
    yield "The seed decides the data partition, the first model, the cohorts and the batches: one run is one sample."
    settings, grid = demo.settings, read_grid()
    if not settings.tuned:
        yield f"Rates and parameters were not tuned for {settings.task}: the result hardly shows which one is better."
        return
    if other := differences(grid, first.method.algorithm, second.method.algorithm):
        yield _on_other_seeds(other, f"{first.title} minus {second.title}", grid)
    yield _tried(grid)
    yield from _caveats(settings, [first.method.algorithm, second.method.algorithm], grid)


def _gap(first: Result, second: Result, examples: int) -> str:
    gap, count = first.averaged.mean_last - second.averaged.mean_last, len(first.averaged.last)
    ahead, behind = (first, second) if gap >= 0 else (second, first)
    size = f"{abs(100 * gap):.1f} points, or {abs(gap) * examples:.1f} of {examples} examples"
    mean = (
        f"the mean accuracy of {ahead.title} is {size}, above that of {behind.title}"
        if gap
        else f"{first.title} and {second.title} have the same mean accuracy"
    )
    worst = _of_each("worst_last", "averaged", first, second)
    return f"Over the last {count} rounds, with the averaged models, {mean}; the worst of these rounds is {worst}."


def _of_each(figure: str, model: str, *results: Result) -> str:
    return " and ".join(f"{percent(getattr(result.curves[model], figure))} for {result.title}" for result in results)


def _on_other_seeds(other: dict[str, Difference], what: str, grid: dict[str, Any]) -> str:
    seeds, averaged, latest = grid["check"]["seeds"], other["averaged"], other["latest"]
    return (
        f"On {len(seeds)} other seeds ({seeds[0]} to {seeds[-1]}, simulated with the chosen settings), {what} "
        f"in the mean of the last {grid['setup']['last']} rounds was {_average(averaged)} with the averaged models, "
        f"and above zero on {averaged.wins} of {len(seeds)}; with the latest models it was {_average(latest)}, and "
        f"above zero on {latest.wins}. {_apart(averaged)}"
    )


def _average(difference: Difference) -> str:
    return f"{_points(difference.average)} on average (standard error {100 * difference.standard_error:.1f})"


def _apart(averaged: Difference) -> str:
    if abs(averaged.average) >= 2 * averaged.standard_error:
        return "The averaged models are two standard errors apart or more."
    return "The averaged models are less than two standard errors apart: these runs do not tell which one is better."


def _caveats(settings: DemoSettings, algorithms: Sequence[str], grid: dict[str, Any]) -> Iterator[str]:
    if edges := [title(name) for name in algorithms if name in grid["choice"] and at_edge(grid, name)]:
        yield f"The choice of {' and '.join(edges)} is at the edge of what was tried: a better one may be outside."
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
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
    }


def _tried(grid: dict[str, Any]) -> str:
    """What the search gave both algorithms."""
    counts = Counter(cell["algorithm"] for cell in grid["cells"])
    cells = ", ".join(f"{count} cells for {title(name)}" for name, count in counts.items())
    norms = sorted({cell["max_gradient_norm"] for cell in grid["cells"]})
    clips = ", ".join(f"{norm:g}" if norm else "none" for norm in norms)
    return (
        f"Tried on seeds {grid['seeds'][0]} to {grid['seeds'][-1]}: {cells}, each judged after all "
        f"{grid['setup']['rounds']} rounds, with the same clipping norms ({clips}) and no weight decay, so the "
        "effective decay of both is 0."
    )


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points"
