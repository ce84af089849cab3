"""Real runs of the digits task: in this process, in workers, and by the command."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import pytest

from fl_ops.commands.compare import progress
from fl_ops.compare.cells import Cell, CellFolder, CellResult
from fl_ops.compare.plan import Plan
from fl_ops.compare.workers import Job, RunCell, run_all
from fl_ops.errors import Exit, Refused
from tests.fl_ops.compare.conftest import Read
from tests.fl_ops.conftest import Fl

NewProcesses = Callable[[], set[BaseProcess]]


def finish_at_once(cell: Cell) -> CellResult:
    """A run that takes no time. Workers import it by name."""
    return CellResult((), 0.0)


def end_process(cell: Cell) -> NoReturn:
    """A run that ends its process, as the kernel does when memory is short."""
    os._exit(3)


def refuse(cell: Cell) -> NoReturn:
    """A run that cannot be started."""
    raise Refused(f"{cell.label} cannot be run")


def nothing_done(cell: Cell) -> None:
    """No cell has a result."""


def test_a_cell_is_a_run_of_its_settings(read: Read) -> None:
    """Two rounds of tuning with a sixth of the 1437 training scans withheld; a repetition has the same models."""
    cell = Plan(read(), nothing_done, ["FedCM"]).missing()[0]
    one, two = RunCell()(cell), RunCell()(cell)
    assert (len(one.rounds), one.diverged, len(one.accuracies)) == (2, None, 2)
    assert [row.model for row in one.rounds] == [row.model for row in two.rounds]
    assert one.rounds[0].bytes_down == 2 * one.rounds[0].bytes_up > 0


@pytest.mark.parametrize("rate", ["1e30", "1e38"])
def test_a_run_that_diverges_is_a_result(read: Read, rate: str) -> None:
    """A huge rate makes values that are not finite, in the clients' updates or in the sum; no round is committed."""
    table = read(("learning_rates = [0.1, 0.2, 0.4]", f"learning_rates = [{rate}]"))
    result = RunCell()(Plan(table, nothing_done, ["FedAvg"]).missing()[0])
    assert (result.diverged, result.rounds) == (0, ())


def test_a_run_that_fails_otherwise_is_an_error(read: Read) -> None:
    """More clients per round than there are: the run fails, and this is no result."""
    table = read(("stop = { rounds = 3 }", "stop = { rounds = 3 }\nround = { clients_per_round = 5 }"))
    with pytest.raises(Refused, match="FedAvg, tuning with seed 9: expected 5 clients or more"):
        RunCell()(Plan(table, nothing_done, ["FedAvg"]).missing()[0])


@pytest.fixture
def new_processes() -> NewProcesses:
    """The child processes that were started since the beginning of the test."""
    before = set[BaseProcess](multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before


@pytest.mark.parametrize(("run", "error"), [(end_process, "ended unexpectedly"), (refuse, "FedAvg cannot be run")])
def test_a_failing_worker_ends_the_comparison(
    read: Read, tmp_path: Path, run: Callable[[Cell], NoReturn], error: str, new_processes: NewProcesses
) -> None:
    """The error has a text, and no process is left."""
    folder = CellFolder(tmp_path)
    with pytest.raises(Refused, match=error):
        run_all(Plan(read(), folder.load), Job(run, folder), 1, lambda cell, result: None)
    assert new_processes() == set()


def test_an_interruption_keeps_finished_cells(read: Read, tmp_path: Path, new_processes: NewProcesses) -> None:
    """Ctrl-C after the second cell: its files are kept, its processes end, and other processes are not touched."""

    def interrupt(cell: Cell, result: CellResult) -> None:
        if len(list(tmp_path.glob("*.json"))) >= 2:
            raise KeyboardInterrupt

    folder = CellFolder(tmp_path)
    plan = Plan(read(), folder.load)
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        run_all(plan, Job(finish_at_once, folder), 1, interrupt)
    assert (len(plan.missing()) < 9, new_processes()) == (True, {other})
    other.kill()
    other.join()


def test_the_command_writes_everything_and_runs_nothing_twice(
    read: Read, tmp_path: Path, fl: Fl, new_processes: NewProcesses
) -> None:
    """Five cells in two processes, each reported once; a second call runs none and writes the same files."""
    read()
    arguments = ("compare", tmp_path / "small.toml", "--out", tmp_path / "out", "--only", "FedAvg", "--json")
    first = fl(*arguments, "--processes", "2")
    assert first.exit_code == Exit.OK, first.stderr
    assert [line.split()[1] for line in first.stderr.splitlines()] == ["1", "2", "3", "4", "5"]
    assert new_processes() == set()
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}
    assert {"results.csv", "summary.csv", "summary.json", "tables.md", "accuracy-by-rounds.png"} <= files.keys()
    second = fl(*arguments)
    assert (json.loads(second.stdout)["cells_done"], second.stderr) == (5, "")
    assert (tmp_path / "out" / "results.csv").read_bytes() == files["results.csv"]


def test_cells_that_finish_together_are_counted_one_by_one(
    read: Read, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers have written their files before the first of them is reported: the counts are 1 and 2."""
    folder = CellFolder(tmp_path)
    plan = Plan(read(), folder.load)
    show = progress(plan, 2)
    cells = plan.missing()[:2]
    for cell in cells:
        folder.save(cell, finish_at_once(cell))
    for cell in cells:
        show(cell, finish_at_once(cell))
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["1", "2"]


def test_a_missing_table_file(fl: Fl) -> None:
    """It is a usage error."""
    done = fl("compare", "nowhere.toml")
    assert (done.exit_code, "there is no file nowhere.toml" in done.stderr) == (Exit.MISUSED, True)


def test_a_page_that_cannot_be_filled_is_reported_before_any_run(read: Read, tmp_path: Path, fl: Fl) -> None:
    """The page does not exist, so no cell is run."""
    read()
    done = fl("compare", tmp_path / "small.toml", "--out", tmp_path / "out", "--page", "none.md")
    assert (done.exit_code, "--page: none.md cannot be read" in done.stderr) == (Exit.MISUSED, True)
    assert not list((tmp_path / "out" / "cells").iterdir())
