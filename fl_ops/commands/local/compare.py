"""`fl compare`: from a table file to numbers, tables and plots. A comparison can be stopped and continued."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fl_common.command_help import FlagGroup
from fl_common.units import counted
from fl_ops.commands.options import CellEngineFlags, Context, TrackerFlags, command, interruptible
from fl_ops.environment import check_plotting
from fl_ops.errors import Exit, Refused, UsageError
from fl_ops.files import Target, written_whole
from fl_ops.render import output

if TYPE_CHECKING:
    from fl_ops.compare.cells import CellFolder
    from fl_ops.compare.plan import Plan
    from fl_ops.compare.progress import Progress
    from fl_ops.compare.workers import Work
    from fl_ops.simulate.engine_choice import EngineOptions
    from fl_ops.trackers.opening import Trackers

CELLS, ROUNDS, SUMMARY, FACTS, TABLES = "cells", "results.csv", "summary.csv", "summary.json", "tables.md"


@dataclass(frozen=True)
class ResultFlags(FlagGroup):
    """The places of results."""

    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the results; by default fl-compare/ and the table's name."),
    ] = None
    cells: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for finished runs; by default cells/ in --out.")
    ] = None
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A Markdown page; the tables replace its marked part.")
    ] = None


@dataclass(frozen=True)
class WorkFlags(FlagGroup):
    """Which runs of the table are done now."""

    processes: Annotated[int, typer.Option(min=1, help="Number of parallel runs; each uses one thread.")] = 1
    only: Annotated[
        list[str] | None, typer.Option(metavar="METHOD", help="A label of the table; repeat it for several.")
    ] = None
    data_root: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the task's data set.")] = None
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="With --no-run: only write the results of finished runs.")
    ] = True
    minutes: Annotated[
        float | None,
        typer.Option(min=0.01, help="Stop after so long and write the results; exit code 8 if runs are left."),
    ] = None


@command
def compare(
    context: Context,
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Methods, splits, seeds and a run's settings; TOML.")],
    results: ResultFlags,
    work: WorkFlags,
    engine: CellEngineFlags,
    tracking: TrackerFlags,
) -> None:
    """Compare methods: tune each in the same way, run the best setting on new seeds, report the spread.

    Every finished run is kept. The same command continues a comparison that was stopped by Ctrl-C or by --minutes,
    also on another machine with a copy of the folder of finished runs.
    """
    from fl_ops.compare.cells import CellFolder
    from fl_ops.compare.plan import Plan
    from fl_ops.compare.table import read_table

    check_plotting("fl compare")
    trackers = tracking.checked()
    options = engine.request().options()
    # What changes the numbers is a setting of each cell. With the coordinator's arithmetic the engine is none.
    comparison = replace(read_table(table), engine=options.arithmetic if options.batched else {})
    out, page = results.out or Path("fl-compare") / table.stem, results.page
    folder = CellFolder(results.cells or out / CELLS)
    for path in (out, folder.path):
        _make_folder(path)
    plan = Plan(comparison, folder.load, work.only or ())
    if page:
        _page_with_tables(page, plan)  # report a page that cannot be filled now, not after hours
    if trackers:
        _track_finished(trackers, plan)
    unfinished = _run(_work(work, plan, folder, options), trackers) if work.run else ""
    facts = _write_results(plan, out, page)
    _warn_of_decays(plan)
    output.show(facts, _closing(plan, out), context.as_json)
    if unfinished:
        print(unfinished, file=sys.stderr)
        raise typer.Exit(Exit.WORK_LEFT)


def _work(flags: WorkFlags, plan: Plan, folder: CellFolder, engine: EngineOptions) -> Work:
    from fl_ops.compare.progress import Costs, Sharing
    from fl_ops.compare.run_cell import RunCell
    from fl_ops.compare.workers import Job, Work

    location = {} if flags.data_root is None else {"data_root": str(flags.data_root.resolve())}
    seconds = None if flags.minutes is None else 60 * flags.minutes
    shared = flags.processes > 1 and engine.device.type != "cpu"
    sharing = Sharing(flags.processes, _note) if shared else None
    return Work(plan, Job(RunCell(location, engine), folder), flags.processes, seconds, Costs(plan.results()), sharing)


def _track_finished(trackers: Trackers, plan: Plan) -> None:
    """Write the cells of earlier calls to the trackers. Raises OpsError."""
    from fl_ops.trackers.simulated import OpenRuns, track_cell

    with OpenRuns(trackers, _note) as runs:
        for cell, result in plan.results():
            track_cell(runs, cell, result)
    runs.check()


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run(work: Work, trackers: Trackers) -> str:
    """Run the missing cells. Returns why some are still missing; empty if none is."""
    from algorithms import AlgorithmError
    from fl_ops.compare.progress import Progress
    from fl_ops.compare.workers import run_all
    from fl_ops.trackers.simulated import OpenRuns, TrackedCells
    from fl_tasks import TaskError

    progress = Progress(work.plan, work.costs, work.processes, _note)
    with (
        interruptible("finished cells are kept and running ones saved, the same command continues from them"),
        OpenRuns(trackers, _note) as runs,
    ):
        try:
            complete = run_all(work, TrackedCells(runs, progress) if trackers else progress)
        except (AlgorithmError, TaskError) as error:
            raise UsageError(str(error)) from error
    runs.check()
    return "" if complete else _unfinished(progress)


def _unfinished(progress: Progress) -> str:
    saved = f"; saved: {progress.running()}" if progress.running() else ""
    return (
        f"stopped by --minutes: {counted(progress.finished, 'cell')} finished, {progress.left()} left{saved}; "
        "the same command continues"
    )


def _write_results(plan: Plan, out: Path, page: Path | None) -> dict[str, Any]:
    """Write every file. Raises Refused if the disk refuses them, UsageError for a page without markers."""
    from fl_ops.compare import report, results

    texts = {
        ROUNDS: results.results_csv(plan),
        SUMMARY: results.summary_csv(plan),
        FACTS: results.summary_json(plan),
        TABLES: report.tables(plan) + "\n",
    }
    for name, text in texts.items():
        _write(out / name, text)
    names = list(texts)
    names += [name for name, of, axis in results.pictures(plan.table) if results.draw(plan, of, axis, out / name)]
    if page:
        _write(page, _page_with_tables(page, plan))
    return {"out": str(out), "files": names, "cells_done": plan.done(), "cells_left": plan.left()[0]}


def _warn_of_decays(plan: Plan) -> None:
    from fl_ops.compare.report import DECAYS_DIFFER
    from fl_ops.compare.summary import decays_differ, rows

    if decays_differ(compared := rows(plan)):
        decays = (f"{row.label} {row.effective_decay:g}" for row in compared if row.effective_decay is not None)
        print(f"warning: {DECAYS_DIFFER} They are: {', '.join(dict.fromkeys(decays))}", file=sys.stderr)


def _page_with_tables(path: Path, plan: Plan) -> str:
    from fl_ops.compare.report import insert_tables

    try:
        return insert_tables(path.read_text(encoding="utf-8"), plan)
    except OSError as error:
        raise UsageError(f"--page: {path} cannot be read: {error.strerror or error}") from error


def _closing(plan: Plan, out: Path) -> str:
    left = plan.left()[0]
    rest = f"; about {counted(left, 'cell')} not done" if left else ""
    return (
        f"{counted(plan.done(), 'cell')}{rest}. {out / TABLES} has the tables; {SUMMARY}, {FACTS} and plots "
        f"are in {out}."
    )


def _write(path: Path, text: str) -> None:
    with written_whole(Target(path, replace=True)) as file:
        file.write(text.encode())


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"{folder} cannot be made: {error.strerror or error}") from error
