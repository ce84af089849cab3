"""The page that a demo leaves behind: what came out, how far it can be trusted, and where the settings come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from fl_ops.demo import comparison, facts, verdict
from fl_ops.demo.facts import Demo
from fl_ops.demo.grid import read_grid
from fl_ops.demo.results import title
from fl_ops.demo.settings import BATCH_SIZE, DIRICHLET_ALPHA, EPOCHS, DemoSettings
from fl_ops.units import duration, percent

_BY_SEED = ("mean_by_seed", "worst_by_seed")
_MOST_CLASSES = 20
"""Side by side on a page."""


def write(demo: Demo, picture: str, numbers: str) -> str:
    """The page in Markdown; picture and numbers are the names of the files beside it."""
    parts = [
        f"# {' and '.join(result.title for result in demo.results)} on {demo.settings.task}",
        f"![Accuracy on held-out data after each round]({picture})",
        _table(["", *map(comparison.name, demo.results)], comparison.rows(demo.results)),
        " ".join(verdict.sentences(demo)),
        "## How it was run",
        *_how(demo, numbers),
        *(_grid(read_grid()) if demo.settings.tuned else _untuned(demo)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _how(demo: Demo, numbers: str) -> Iterator[str]:
    settings, examples = demo.settings, [sum(row) for row in demo.dealt.classes]
    few, many = min(examples), max(examples)
    held_out = f" ({demo.dealt.held_out})" if demo.dealt.held_out else ""
    yield (
        f"One coordinator and {settings.clients} daemons, each a process of its own, spoke gRPC over loopback. "
        f"{settings.clients_per_round} of {settings.clients} clients trained in each of {settings.rounds} rounds, "
        f"{EPOCHS} local epochs with batches of {BATCH_SIZE}, under seed {settings.seed}; every algorithm had the same "
        "daemons, data, cohorts, first model and number of rounds. "
        f"Accuracy is that of the coordinator's model on {demo.dealt.evaluation_examples} examples that nobody trains "
        f"on{held_out}."
    )
    yield (
        f"Classes were dealt with Dirichlet {DIRICHLET_ALPHA:g}, "
        f"{few if few == many else f'{few} to {many}'} examples to a client:"
    )
    yield _classes(demo.dealt.classes)
    yield (
        f"The daemons were there after {duration(demo.start_seconds)}, all was done after "
        f"{duration(demo.seconds)}. Down and up count the bytes of tensors. Versions: "
        f"{', '.join(f'{name} {version}' for name, version in facts.versions().items())}; "
        f"{facts.machine()['system']}, {facts.machine()['cpus']} CPUs. Every number is in [{numbers}]({numbers})."
    )
    yield f"```sh\n{_command(settings)}\n```"


def _command(settings: DemoSettings) -> str:
    usual = DemoSettings()
    words = ["fl demo"]
    if settings.algorithms != usual.algorithms:
        words += [f"--algorithm {algorithm}" for algorithm in settings.algorithms]
    for name in ("rounds", "clients", "task", "seed", "learning_rate"):
        value = getattr(settings, name)
        if value != getattr(usual, name):
            words.append(f"--{name.replace('_', '-')} {value}")
    words += [f"--data-root {value}" for value in settings.options.values()]
    return " ".join(words)


def _classes(counts: Sequence[Sequence[int]]) -> str:
    """Examples of each class that each client holds; with many classes, how many classes."""
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


def _grid(grid: dict[str, Any]) -> Iterator[str]:
    setup = grid["setup"]
    yield "## Where the settings come from"
    yield (
        f"`{grid['command']}` searched once, on {grid['date']} in {duration(grid['seconds'])}: "
        f"{len(grid['cells'])} cells, each on the seeds {', '.join(map(str, grid['seeds']))}, "
        f"{setup['rounds']} rounds. Accuracy was measured on {setup['validation']}; the demo's held-out data were not "
        f"looked at. For each algorithm the choice is {grid['rule']}."
    )
    yield f"Validation accuracy by rate: mean of the last {setup['last']} rounds and of all seeds, chosen bold."
    yield _cells(grid)
    check = grid["check"]
    yield (
        f"The chosen cells on {len(check['seeds'])} fresh seeds, with all training data, on the demo's held-out data "
        f"(mean and worst of the last {setup['last']} rounds; nothing was chosen by it):"
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
