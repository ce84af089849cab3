"""`fl compare`: from a table file to numbers, tables and pictures, in as many sittings as it takes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fl_ops import output
from fl_ops.errors import Misused, Refused
from fl_ops.files import Target, written_whole
from fl_ops.interrupts import ended_by_signals
from fl_ops.options import Context, command
from fl_ops.units import duration, percent

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
        typer.Option(metavar="DIR", help="Where the results go; by default fl-compare/ and the table's name."),
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs at a time, each with one thread.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="A label of the table; repeat it for several.")
    ] = None,
    data_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the task's data set.")] = None,
    cells: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where finished runs are kept; by default cells/ in --out.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Markdown page whose marked part gets the tables.")
    ] = None,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Without: results of what is finished.")] = True,
) -> None:
    """Compare methods: tune each alike, run the choice on fresh seeds, tell the spread.

    Every run is kept as it ends: a comparison that was stopped goes on where it was.
    """
    from fl_ops.compare.cells import CellFolder
    from fl_ops.compare.plan import Plan
    from fl_ops.compare.table import read_table
    from fl_ops.demo.dealing import check_installed

    check_installed("fl compare")
    described = read_table(table)
    out = out or Path("fl-compare") / table.stem
    folder = CellFolder(cells or out / CELLS)
    for path in (out, folder.path):
        _make(path)
    plan = Plan(described, folder.load, only or ())
    if page:
        _filled(page, plan)  # hours later is too late to find that it cannot be
    if run:
        places = {} if data_root is None else {"data_root": str(data_root.resolve())}
        _run(plan, folder, processes, places)
    facts = _leave(plan, out, page)
    output.show(facts, _closing(plan, out), context.as_json)


def _run(plan: Plan, folder: CellFolder, processes: int, places: dict[str, Any]) -> None:
    from algorithms import AlgorithmError
    from fl_ops.compare.running import RunCell
    from fl_ops.compare.workers import Job, run_all
    from tasks import TaskError

    with ended_by_signals("finished cells are kept, the same command goes on from them"):
        try:
            run_all(plan, Job(RunCell(places), folder), processes, _progress(plan, processes))
        except (AlgorithmError, TaskError) as error:
            raise Misused(str(error)) from error


def _progress(plan: Plan, processes: int) -> Callable[[Cell, CellResult], None]:
    """Tells of each cell on stderr: how many are done, how long the rest takes, what is best so far."""
    spent, best = [0.0, 0], (0.0, "")

    def told(cell: Cell, result: CellResult) -> None:
        nonlocal best
        reached = max(result.accuracies, default=0.0)
        if cell.stage == "final":
            best = max(best, (reached, cell.label))
        spent[0] += result.seconds
        spent[1] += len(result.rounds)
        cells, rounds = plan.left()
        eta = duration(rounds * spent[0] / max(spent[1], 1) / processes)
        done = plan.done()
        ended = f"diverged in round {result.diverged}" if result.diverged is not None else percent(reached, 1)
        leader = f"; best on the test set {best[1]} {percent(best[0], 1)}" if best[1] else ""
        rate = f"rate {cell.settings['run']['local']['learning_rate']:g}"
        print(
            f"{time.strftime('%H:%M:%S')}  {done} of at most {done + cells}, {eta} to go  {cell.label}, {cell.stage}, "
            f"seed {cell.seed}, {rate}: {ended} in {duration(result.seconds)}{leader}",
            file=sys.stderr,
            flush=True,
        )

    return told


def _leave(plan: Plan, out: Path, page: Path | None) -> dict[str, Any]:
    """Writes every file. Raises Refused for a disk that does not take them, Misused for a page without its marks."""
    from fl_ops.compare import page as pages
    from fl_ops.compare import picture, results

    texts = {
        ROUNDS: results.results_csv(plan),
        SUMMARY: results.summary_csv(plan),
        FACTS: results.summary_json(plan),
        TABLES: pages.tables(plan) + "\n",
    }
    for name, text in texts.items():
        _write(out / name, text)
    names = list(texts)
    for number, split in enumerate(plan.table.own.splits):
        for axis in ("rounds", "megabytes"):
            name = f"accuracy-by-{axis}{f'-{number + 1}' if number else ''}.png"
            if picture.draw(plan, split, axis, out / name):
                names.append(name)
    if page:
        _write(page, _filled(page, plan))
    return {"out": str(out), "files": names, "cells_done": plan.done(), "cells_left": plan.left()[0]}


def _filled(path: Path, plan: Plan) -> str:
    from fl_ops.compare import page as pages

    try:
        return pages.filled(path.read_text(encoding="utf-8"), plan)
    except OSError as error:
        raise Misused(f"--page: {path} cannot be read: {error.strerror or error}") from error


def _closing(plan: Plan, out: Path) -> str:
    left = plan.left()[0]
    rest = f"; {left} cells at most are not done" if left else ""
    return f"{plan.done()} cells{rest}. {out / TABLES} has the tables, with {SUMMARY}, {FACTS} and pictures beside it."


def _write(path: Path, text: str) -> None:
    with written_whole(Target(path, replace=True)) as file:
        file.write(text.encode())


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"{folder} cannot be made: {error.strerror or error}") from error
