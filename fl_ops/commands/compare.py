"""`fl compare`: from a table file to numbers, tables and plots. A comparison can be stopped and continued."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fl_ops.commands.interrupts import interruptible
from fl_ops.commands.options import Context, command
from fl_ops.environment import check_plotting
from fl_ops.errors import Refused, UsageError
from fl_ops.files import Target, written_whole
from fl_ops.render import output
from fl_ops.render.units import duration, percent

if TYPE_CHECKING:
    from fl_ops.compare.cells import Cell, CellFolder, CellResult
    from fl_ops.compare.plan import Plan

CELLS, ROUNDS, SUMMARY, FACTS, TABLES = "cells", "results.csv", "summary.csv", "summary.json", "tables.md"


@command
def compare(
    context: Context,
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Methods, splits, seeds and a run's settings; TOML.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the results; by default fl-compare/ and the table's name."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of parallel runs; each uses one thread.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="A label of the table; repeat it for several.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the task's data set.")] = None,
    cells: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for finished runs; by default cells/ in --out.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Markdown page; the tables replace its marked part.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="With --no-run: only write the results of finished runs.")
    ] = True,
) -> None:
    """Compare methods: tune each in the same way, run the best setting on new seeds, report the spread.

    Every finished run is kept. The same command continues a comparison that was stopped.
    """
    from fl_ops.compare.cells import CellFolder
    from fl_ops.compare.plan import Plan
    from fl_ops.compare.table import read_table

    check_plotting("fl compare")
    comparison = read_table(table)
    out = out or Path("fl-compare") / table.stem
    folder = CellFolder(cells or out / CELLS)
    for path in (out, folder.path):
        _make_folder(path)
    plan = Plan(comparison, folder.load, only or ())
    if page:
        _page_with_tables(page, plan)  # report a page that cannot be filled now, not after hours
    if run:
        location = {} if data_root is None else {"data_root": str(data_root.resolve())}
        _run(plan, folder, processes, location)
    facts = _write_results(plan, out, page)
    output.show(facts, _closing(plan, out), context.as_json)


def _run(plan: Plan, folder: CellFolder, processes: int, data_location: dict[str, Any]) -> None:
    from algorithms import AlgorithmError
    from fl_ops.compare.workers import Job, RunCell, run_all
    from tasks import TaskError

    with interruptible("finished cells are kept, the same command continues from them"):
        try:
            run_all(plan, Job(RunCell(data_location), folder), processes, progress(plan, processes))
        except (AlgorithmError, TaskError) as error:
            raise UsageError(str(error)) from error


def progress(plan: Plan, processes: int) -> Callable[[Cell, CellResult], None]:
    """Prints a line on stderr for each finished cell: cells done, time left, and the best method so far."""
    seconds, rounds_done, best = 0.0, 0, (0.0, "")
    done = plan.done()

    def show(cell: Cell, result: CellResult) -> None:
        nonlocal seconds, rounds_done, best, done
        done += 1  # plan.done() may already count a cell whose worker has written its file and not reported it
        accuracy = max(result.accuracies, default=0.0)
        if cell.stage == "final":
            best = max(best, (accuracy, cell.label))
        seconds += result.seconds
        rounds_done += len(result.rounds)
        cells, rounds = plan.left()
        eta = duration(rounds * seconds / max(rounds_done, 1) / processes)
        ended = f"diverged in round {result.diverged}" if result.diverged is not None else percent(accuracy, 1)
        leader = f"; best on the test set {best[1]} {percent(best[0], 1)}" if best[1] else ""
        rate = f"rate {cell.settings['run']['local']['learning_rate']:g}"
        print(
            f"{time.strftime('%H:%M:%S')}  {done} of at most {plan.done() + cells}, {eta} to go  "
            f"{cell.label}, {cell.stage}, seed {cell.seed}, {rate}: {ended} in {duration(result.seconds)}{leader}",
            file=sys.stderr,
            flush=True,
        )

    return show


def _write_results(plan: Plan, out: Path, page: Path | None) -> dict[str, Any]:
    """Write every file. Raises Refused if the disk refuses them, UsageError for a page without markers."""
    from fl_ops.compare import data_files, plot, report

    texts = {
        ROUNDS: data_files.results_csv(plan),
        SUMMARY: data_files.summary_csv(plan),
        FACTS: data_files.summary_json(plan),
        TABLES: report.tables(plan) + "\n",
    }
    for name, text in texts.items():
        _write(out / name, text)
    names = list(texts)
    for number, split in enumerate(plan.table.spec.splits):
        for axis in plot.AXES:
            name = f"accuracy-by-{axis}{f'-{number + 1}' if number else ''}.png"
            if plot.draw(plan, split, axis, out / name):
                names.append(name)
    if page:
        _write(page, _page_with_tables(page, plan))
    return {"out": str(out), "files": names, "cells_done": plan.done(), "cells_left": plan.left()[0]}


def _page_with_tables(path: Path, plan: Plan) -> str:
    from fl_ops.compare.report import insert_tables

    try:
        return insert_tables(path.read_text(encoding="utf-8"), plan)
    except OSError as error:
        raise UsageError(f"--page: {path} cannot be read: {error.strerror or error}") from error


def _closing(plan: Plan, out: Path) -> str:
    left = plan.left()[0]
    rest = f"; at most {left} cells are not done" if left else ""
    return f"{plan.done()} cells{rest}. {out / TABLES} has the tables; {SUMMARY}, {FACTS} and plots are in {out}."


def _write(path: Path, text: str) -> None:
    with written_whole(Target(path, replace=True)) as file:
        file.write(text.encode())


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"{folder} cannot be made: {error.strerror or error}") from error
