"""`fl demo`: compare two algorithms on this machine, from nothing to a page with a plot."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fl_common.units import duration, plain
from fl_ops.commands import completion
from fl_ops.commands.options import Context, command, interruptible
from fl_ops.demo import conclusions, plot, report
from fl_ops.demo.faults import show_faults
from fl_ops.demo.fleet import Fleet
from fl_ops.demo.processes import ChildEnded, Processes
from fl_ops.demo.recovery import recover
from fl_ops.demo.results import Demo, as_json
from fl_ops.demo.settings import DemoSettings
from fl_ops.demo.training import train
from fl_ops.environment import check_plotting
from fl_ops.errors import Refused, UsageError
from fl_ops.files import writable_folder
from fl_ops.render import output

PLOT, PAGE, NUMBERS, LOGS = "accuracy.png", "report.md", "demo.json", "logs"


Algorithms = Annotated[
    list[str] | None,
    typer.Option(
        help="Repeat it for several. By default fedcm, then fedavg.",
        show_default=False,
        autocompletion=completion.method_names,
    ),
]
Task = Annotated[
    str,
    typer.Option(
        metavar="TASK",
        help="A built-in task, or module:attribute of a module in this folder.",
        autocompletion=completion.task_names,
    ),
]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Folder for the page, the plot, the numbers and the logs.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the data partition, the first model and the cohorts.")]
LearningRate = Annotated[
    float | None,
    typer.Option(help="For every algorithm, instead of the tuned rates (0.1 for your own task).", show_default=False),
]
Clients = Annotated[int, typer.Option(min=1, help="Number of daemons; two of them train in each round.")]
DataRoot = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the task's data set, for tasks that need one.")
]


@command
def demo(
    context: Context,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds for each algorithm.")] = DemoSettings.rounds,
    clients: Clients = DemoSettings.clients,
    algorithm: Algorithms = None,
    task: Task = DemoSettings.task,
    out: Out = DemoSettings.out,
    seed: Seed = 0,
    learning_rate: LearningRate = None,
    data_root: DataRoot = None,
) -> None:
    """Compare FedCM and FedAvg on this machine, with a coordinator and daemons as processes and non-IID data.

    Then it kills the coordinator in a round, starts it again, and compares the bits of the models with the first run.
    Shows the rounds and the comparison, and writes a page, a plot, JSON and logs to --out. No process is left.
    """
    settings = DemoSettings(
        algorithms=tuple(dict.fromkeys(algorithm or DemoSettings.algorithms)),
        rounds=rounds,
        clients=clients,
        task=task,
        options={} if data_root is None else {"data_root": str(data_root.resolve())},
        seed=seed,
        learning_rate=_positive(learning_rate),
        out=out,
    )
    check_plotting("fl demo")
    # With --json, stdout is for the result only.
    console = Console(stderr=context.as_json)
    for folder in (settings.out, settings.out / LOGS):
        writable_folder(folder)
    with interruptible("every process has ended, no results were written"):
        done = _run(settings, console)
    try:
        _write_results(done, console, context)
    except OSError as exc:
        raise Refused(f"the results cannot be written to {settings.out}: {exc.strerror or exc}") from exc


def _run(settings: DemoSettings, console: Console) -> Demo:
    began = time.monotonic()

    def show(text: str) -> None:
        console.print(f"{time.monotonic() - began:5.1f} s  {plain(text)}", markup=False, highlight=False)

    with (
        tempfile.TemporaryDirectory(prefix="fl-demo-") as folder,
        _showing_logs(),
        Processes(settings.out / LOGS) as processes,
    ):
        fleet = Fleet(settings, Path(folder), processes)
        data = fleet.start(show)
        start_seconds = time.monotonic() - began
        with fleet.connect() as client:
            results = train(client, settings, processes, console)
        recovery = recover(fleet, settings, results[0].method, results[0].rounds, show)
        faults = show_faults(fleet, settings, show)
    return Demo(settings, data, results, start_seconds, time.monotonic() - began, recovery, faults)


def _write_results(done: Demo, console: Console, context: Context) -> None:
    """Write the files and print the comparison."""
    settings, facts = done.settings, as_json(done)
    plot.draw(settings, done.results, settings.out / PLOT, done.data.method)
    (settings.out / NUMBERS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (settings.out / PAGE).write_text(report.page(done, PLOT, NUMBERS), encoding="utf-8")
    if context.as_json:
        output.show(facts, "", as_json=True)
        return
    console.print(report.comparison_table(done.results))
    for sentence in conclusions.sentences(done):
        console.print(plain(sentence), markup=False, highlight=False)
    files = f"{settings.out / PAGE} has the results, with {PLOT} and {NUMBERS}; done in {duration(done.seconds)}."
    console.print(f"\n{plain(files)}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _showing_logs() -> Iterator[None]:
    """Print the last lines of a child's log if that child ended the demo."""
    try:
        yield
    except ChildEnded as error:
        print(*map(plain, error.tail), sep="\n", file=sys.stderr)
        raise


def _positive(rate: float | None) -> float | None:
    if rate is not None and not 0 < rate < float("inf"):
        raise UsageError(f"--learning-rate: expected a number over 0, got {rate}")
    return rate
