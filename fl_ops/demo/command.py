"""`fl demo`: everything on this machine, from nothing to a page with a picture."""

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

from fl_ops import output
from fl_ops.demo import comparison, page, picture, verdict
from fl_ops.demo.dealing import check_installed
from fl_ops.demo.facts import Demo, as_json
from fl_ops.demo.fleet import Fleet
from fl_ops.demo.processes import ChildEnded, Processes
from fl_ops.demo.settings import DemoSettings
from fl_ops.demo.training import train
from fl_ops.errors import Misused, Refused
from fl_ops.interrupts import ended_by_signals
from fl_ops.options import Context, command
from fl_ops.units import duration, plain

PICTURE, PAGE, NUMBERS, LOGS = "accuracy.png", "report.md", "demo.json", "logs"


@command
def demo(
    context: Context,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds for each algorithm.")] = 40,
    clients: Annotated[int, typer.Option(min=1, help="Daemons; two of them train in a round.")] = 8,
    algorithm: Annotated[
        list[str] | None, typer.Option(help="Repeat it for several. By default fedcm, then fedavg.", show_default=False)
    ] = None,
    task: Annotated[
        str, typer.Option(metavar="TASK", help="A built-in task, or module:attribute of a module in this folder.")
    ] = DemoSettings.task,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where page, picture, numbers and logs go.")
    ] = DemoSettings.out,
    seed: Annotated[int, typer.Option(min=0, help="Deals the data, makes the first model, draws cohorts.")] = 0,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="For every algorithm, in place of the tuned ones (0.1 for a task of your own).", show_default=False
        ),
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the task's data set, for tasks that want one.")
    ] = None,
) -> None:
    """Train on this machine: a coordinator and daemons as processes, FedCM and FedAvg on the same unlike data.

    Shows the rounds, compares, and leaves a page, a picture, JSON and logs in --out. No process stays behind.
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
    _demonstrate(settings, context)


def _demonstrate(settings: DemoSettings, context: Context) -> None:
    check_installed()
    # With --json, stdout is the result's alone.
    console = Console(stderr=context.as_json)
    _make_folders(settings.out)
    with ended_by_signals("every process has ended, no results were written"):
        done = _run(settings, console)
    try:
        _leave(done, console, context)
    except OSError as exc:
        raise Refused(f"the results cannot be written to {settings.out}: {exc.strerror or exc}") from exc


def _run(settings: DemoSettings, console: Console) -> Demo:
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:5.1f} s  {plain(text)}", markup=False, highlight=False)

    with (
        tempfile.TemporaryDirectory(prefix="fl-demo-") as folder,
        _showing_logs(),
        Processes(settings.out / LOGS) as processes,
    ):
        fleet = Fleet(settings, Path(folder), processes)
        dealt = fleet.start(say)
        start_seconds = time.monotonic() - began
        with fleet.connect() as client:
            results = train(client, settings, processes.check, console)
    return Demo(settings, dealt, results, start_seconds, time.monotonic() - began)


def _leave(done: Demo, console: Console, context: Context) -> None:
    """Writes the files and prints the comparison."""
    settings, facts = done.settings, as_json(done)
    picture.draw(settings, done.results, settings.out / PICTURE)
    (settings.out / NUMBERS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    (settings.out / PAGE).write_text(page.write(done, PICTURE, NUMBERS), encoding="utf-8")
    if context.as_json:
        output.show(facts, "", as_json=True)
        return
    console.print(comparison.table(done.results))
    for sentence in verdict.sentences(done):
        console.print(plain(sentence), markup=False, highlight=False)
    where = f"{settings.out / PAGE} shows it with {PICTURE} and {NUMBERS}; done in {duration(done.seconds)}."
    console.print(f"\n{plain(where)}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _showing_logs() -> Iterator[None]:
    """What a child said last, when it is the one that ended the demo."""
    try:
        yield
    except ChildEnded as error:
        print(*map(plain, error.tail), sep="\n", file=sys.stderr)
        raise


def _make_folders(out: Path) -> None:
    """So that a folder that cannot be written to is told now, not when there are results."""
    try:
        (out / LOGS).mkdir(parents=True, exist_ok=True)
        for folder in (out, out / LOGS):
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as exc:
        raise Misused(f"--out: nothing can be written to {out}: {exc.strerror or exc}; choose another folder") from exc


def _positive(rate: float | None) -> float | None:
    if rate is not None and not 0 < rate < float("inf"):
        raise Misused(f"--learning-rate: expected a number over 0, got {rate}")
    return rate
