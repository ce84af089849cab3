"""Sentences on the difference between two runs: its size, its reliability, and the difference on other seeds.

Every sentence follows from measured numbers, whichever algorithm is better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fl_common.units import duration, percent, size
from fl_ops.demo.results import Demo, Result, title
from fl_ops.demo.settings import (
    BATCH_SIZE,
    DIRICHLET_ALPHA,
    EPOCHS,
    TARGET,
    DemoSettings,
    Difference,
    at_edge,
    difference,
    read_grid,
)
from fl_ops.environment import machine, versions
from fl_ops.render.fitted import FirstThatFits, FittedTable


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
    yield from grid.get("notes", ())  # what a later search found
    if settings.seed in (*grid["seeds"], *grid["check"]["seeds"]):
        yield f"Seed {settings.seed} was used in the grid search or its check: it is no new evidence."
    if settings.learning_rate is not None:
        yield f"The rate {settings.learning_rate:g} was given by --learning-rate; the grid search did not choose it."
    if _searched(settings) != {key: grid["setup"][key] for key in _searched(settings)}:
        yield "The grid search used another number of rounds or clients: its choice may not fit this run."


def _searched(settings: DemoSettings) -> dict[str, Any]:
    return {
        "clients": settings.clients,
        "rounds": settings.rounds,
        "clients_per_round": settings.clients_per_round,
        "epochs": EPOCHS,
        "batch_size": BATCH_SIZE,
    }


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points"


_BY_SEED = ("mean_by_seed", "worst_by_seed")
_HOW = {
    "dirichlet": f"The classes were partitioned with Dirichlet {DIRICHLET_ALPHA:g}",
    "natural": "The examples were partitioned by the groups of the task (`train_groups`)",
    "iid": "The task has neither classes nor groups, so the examples were partitioned at random",
}
"""Partition method -> the sentence about it."""
_MOST_CLASSES = 20
"""With more classes, the page has their number only."""


def comparison_rows(results: Sequence[Result]) -> list[list[str]]:
    """One row for each figure: its name, then one column for each algorithm."""
    last = len(results[0].last)
    names = [
        "Learning rate", "Final accuracy", f"Mean of the last {last} rounds", f"Worst of the last {last} rounds",
        f"Rounds to {percent(TARGET, 0)}", "Bytes down", "Bytes up", "Time",
    ]  # fmt: skip
    columns = map(_figures, results)
    return [[name, *values] for name, *values in zip(names, *columns, strict=True)]


def _figures(result: Result) -> list[str]:
    reached = result.rounds_to_target
    return [
        f"{result.method.learning_rate:g}", percent(result.final), percent(result.mean_last),
        percent(result.worst_last), "never" if reached is None else str(reached), size(result.bytes_down),
        size(result.bytes_up), duration(result.seconds),
    ]  # fmt: skip


def comparison_table(results: Sequence[Result]) -> RenderableType:
    """The comparison for the terminal: a column for each algorithm, or a block for each if they do not fit."""
    rows = comparison_rows(results)
    table = FittedTable(("", *(f">{result.label}" for result in results)))
    for row in rows:
        table.add_row(*row)
    blocks = [FittedTable(("", f">{result.label}")) for result in results]
    for index, block in enumerate(blocks, 1):
        for row in rows:
            block.add_row(row[0], row[index])
    return FirstThatFits([table, Group(*(part for block in blocks for part in (block, Text())))])


def page(demo: Demo, plot: str, numbers: str) -> str:
    """The Markdown page. plot, numbers: names of the PNG and JSON files in the same folder."""
    parts = [
        f"# {' and '.join(result.title for result in demo.results)} on {demo.settings.task}",
        f"![Accuracy on held-out data after each round]({plot})",
        _table(["", *(result.label for result in demo.results)], comparison_rows(demo.results)),
        " ".join(sentences(demo)),
        "## How it was run",
        *_setup(demo, numbers),
        *(_grid_search(read_grid()) if demo.settings.tuned else _untuned(demo)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _setup(demo: Demo, numbers: str) -> Iterator[str]:
    settings, examples = demo.settings, [sum(row) for row in demo.data.classes]
    few, many = min(examples), max(examples)
    held_out = f" ({demo.data.held_out})" if demo.data.held_out else ""
    yield (
        f"One coordinator and {settings.clients} daemons, each in its own process, communicated by gRPC over loopback. "
        f"{settings.clients_per_round} of {settings.clients} clients trained in each of {settings.rounds} rounds, "
        f"with {EPOCHS} local epochs, batches of {BATCH_SIZE} and seed {settings.seed}. Every algorithm had the same "
        "daemons, data, cohorts, first model and number of rounds. "
        f"Accuracy is measured for the coordinator's model on {demo.data.evaluation_examples} examples that no client "
        f"has{held_out}."
    )
    yield (
        f"{_HOW[demo.data.method]}; each client has {few if few == many else f'{few} to {many}'} examples"
        f"{':' if demo.data.method == 'dirichlet' else '.'}"
    )
    if demo.data.method == "dirichlet":
        yield _classes(demo.data.classes)
    yield (
        f"All daemons were present after {duration(demo.start_seconds)}; the demo took {duration(demo.seconds)}. "
        "Bytes down and up are tensor bytes. Versions: "
        f"{', '.join(f'{name} {version}' for name, version in versions().items())}; "
        f"{machine()['system']}, {machine()['cpus']} CPUs. [{numbers}]({numbers}) has all numbers."
    )
    yield f"```sh\n{_command(settings)}\n```"


def _command(settings: DemoSettings) -> str:
    default = DemoSettings()
    parts = ["fl demo"]
    if settings.algorithms != default.algorithms:
        parts += [f"--algorithm {algorithm}" for algorithm in settings.algorithms]
    for name in ("rounds", "clients", "task", "seed", "learning_rate"):
        value = getattr(settings, name)
        if value != getattr(default, name):
            parts.append(f"--{name.replace('_', '-')} {value}")
    parts += [f"--data-root {value}" for value in settings.options.values()]
    return " ".join(parts)


def _classes(counts: Sequence[Sequence[int]]) -> str:
    """Number of examples of each class for each client; with many classes, the number of classes."""
    if len(counts[0]) > _MOST_CLASSES:
        rows = [[str(index), str(sum(row)), str(sum(map(bool, row)))] for index, row in enumerate(counts)]
        return _table(["Client", "Examples", "Classes"], rows)
    rows = [[str(index), *(str(count or "") for count in row)] for index, row in enumerate(counts)]
    return _table(["Client", *(f"class {label}" for label in range(len(counts[0])))], rows)


def _untuned(demo: Demo) -> Iterator[str]:
    yield "## Where the settings come from"
    for result in demo.results:
        parameters = "".join(f", {key} {value}" for key, value in result.parameters.items())
        yield f"- {result.title}: rate {result.method.learning_rate:g} ({result.method.source}){parameters}"


def _grid_search(grid: dict[str, Any]) -> Iterator[str]:
    setup = grid["setup"]
    yield "## Where the settings come from"
    yield (
        f"`{grid['command']}` searched on {grid['date']} for {duration(grid['seconds'])}: "
        f"{len(grid['cells'])} cells, each with the seeds {', '.join(map(str, grid['seeds']))}, "
        f"{setup['rounds']} rounds. Accuracy was measured on {setup['validation']}; the demo's held-out data were not "
        f"used. For each algorithm the choice is {grid['rule']}."
    )
    yield f"Validation accuracy by rate: mean of the last {setup['last']} rounds and all seeds; the choice is bold."
    yield _cells(grid)
    check = grid["check"]
    yield (
        f"The chosen cells with {len(check['seeds'])} other seeds and all training data, on the demo's held-out data "
        f"(mean and worst of the last {setup['last']} rounds; not used for the choice):"
    )
    rows = [
        [title(cell["algorithm"]), *(percent(of(cell[key])) for of in (fmean, min) for key in _BY_SEED)]
        for cell in check["cells"]
    ]
    yield _table(["", "Mean, average seed", "Worst, average seed", "Mean, worst seed", "Worst, worst seed"], rows)


def _cells(grid: dict[str, Any]) -> str:
    rates = sorted({cell["learning_rate"] for cell in grid["cells"]})
    rows: dict[str, dict[float, str]] = {}
    for cell in grid["cells"]:
        parameters = "".join(f", {key} {value}" for key, value in cell["parameters"].items())
        choice = {key: cell[key] for key in ("learning_rate", "parameters")}
        text = percent(cell["mean"])
        chosen = grid["choice"][cell["algorithm"]] == choice
        row = rows.setdefault(title(cell["algorithm"]) + parameters, {})
        row[cell["learning_rate"]] = f"**{text}**" if chosen else text
    table = [[name, *(row.get(rate, "") for rate in rates)] for name, row in rows.items()]
    return _table(["", *(f"{rate:g}" for rate in rates)], table)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
