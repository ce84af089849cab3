"""The comparison as a table for the terminal and as a Markdown page, with the set-up and the source of the settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fl_common.units import duration, percent, size
from fl_ops.demo import conclusions
from fl_ops.demo.results import Curve, Demo, Result
from fl_ops.demo.settings import BATCH_SIZE, DIRICHLET_ALPHA, METRICS, STEPS, TARGET, DemoSettings, read_grid, title
from fl_ops.environment import machine, versions
from fl_ops.render.fitted import FirstThatFits, FittedTable

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
    columns = [_figures(result) for result in results]
    return [[name, *(column[name] for column in columns)] for name in columns[0]]


def _figures(result: Result) -> dict[str, str]:
    method = result.method
    return {
        "Learning rate": f"{method.learning_rate:g}",
        "Gradient clipping": f"{method.max_gradient_norm:g}" if method.max_gradient_norm else "none",
        **_accuracies("Averaged", result.averaged),
        **_accuracies("Latest", result.curves["latest"]),
        "Bytes down": size(result.bytes_down),
        "Bytes up": size(result.bytes_up),
        "Time": duration(result.seconds),
    }


def _accuracies(model: str, curve: Curve) -> dict[str, str]:
    last, reached = f"last {len(curve.last)} rounds", curve.rounds_to_target
    return {
        f"{model} model: mean of the {last}": percent(curve.mean_last),
        f"{model} model: worst of the {last}": percent(curve.worst_last),
        f"{model} model: final accuracy": percent(curve.final),
        f"{model} model: rounds to {percent(TARGET, 0)}": "never" if reached is None else str(reached),
    }


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
        " ".join(conclusions.sentences(demo)),
        *(["## A coordinator that is killed", demo.recovery.sentence] if demo.recovery else []),
        *(["## Faulty clients", *demo.faults] if demo.faults else []),
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
        f"with {STEPS} local steps, batches of {BATCH_SIZE} and seed {settings.seed}. Every algorithm had the same "
        "daemons, data, cohorts, first model and number of rounds. "
        f"Accuracy is measured on {demo.data.evaluation_examples} examples that no client has{held_out}: for "
        "the latest model of the coordinator, and for the average of the models so far, in which each round the "
        f"average so far counts {settings.averaging['decay']:g} and the new model the rest. Training does not use it."
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
    decays = ", ".join(f"{percent(decay['mean'])} with {decay['decay']:g}" for decay in grid["decays"])
    yield "## Where the settings come from"
    yield (
        f"`{grid['command']}` searched on {grid['date']} for {duration(grid['seconds'])}: "
        f"{len(grid['cells'])} cells, each with the seeds {', '.join(map(str, grid['seeds']))}, "
        f"{setup['rounds']} rounds. Accuracy was measured on {setup['validation']}; the demo's held-out data were not "
        f"used. For each algorithm the choice is {grid['rule']}. The decay of the averaged models is then chosen "
        f"for all algorithms together: {decays} (mean of the chosen cells, with the same seeds and scans)."
    )
    yield (
        f"Validation accuracy of the averaged model by rate, with the decay {setup['search_decay']:g}: mean of the "
        f"last {setup['last']} rounds and all seeds; the choice is bold."
    )
    yield _cells(grid)
    check = grid["check"]
    yield (
        f"The chosen cells with {len(check['seeds'])} other seeds and all training data, on the demo's held-out data "
        f"(mean and worst of the last {setup['last']} rounds; not used for the choice):"
    )
    rows = [
        [
            f"{title(cell['algorithm'])}, {model}",
            *(percent(of(cell[model][key])) for of in (fmean, min) for key in _BY_SEED),
        ]
        for model in METRICS
        for cell in check["cells"]
    ]
    yield _table(["", "Mean, average seed", "Worst, average seed", "Mean, worst seed", "Worst, worst seed"], rows)


def _cells(grid: dict[str, Any]) -> str:
    rates = sorted({cell["learning_rate"] for cell in grid["cells"]})
    rows: dict[str, dict[float, str]] = {}
    for cell in grid["cells"]:
        choice, text = grid["choice"][cell["algorithm"]], percent(cell["averaged"]["mean"])
        row = rows.setdefault(_without_rate(cell), {})
        row[cell["learning_rate"]] = f"**{text}**" if choice.items() <= cell.items() else text
    table = [[name, *(row.get(rate, "") for rate in rates)] for name, row in rows.items()]
    return _table(["", *(f"{rate:g}" for rate in rates)], table)


def _without_rate(cell: dict[str, Any]) -> str:
    parameters = "".join(f", {key} {value}" for key, value in cell["parameters"].items())
    norm = cell["max_gradient_norm"]
    return title(cell["algorithm"]) + parameters + (f", clipped at {norm:g}" if norm else "")


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---", *["--:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
