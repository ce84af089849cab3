"""Real runs, of the digits that come along: in this process, in workers, and by the command."""

import json
import multiprocessing
import os
import time

import pytest

from fl_ops.compare.cells import CellFolder, CellResult
from fl_ops.compare.plan import Plan
from fl_ops.compare.running import RunCell
from fl_ops.compare.workers import Job, run_all
from fl_ops.errors import Exit, Refused


def stand_in(cell):
    """A run that takes no time; by name, for workers import it."""
    return CellResult((), 0.0)


def ends_its_process(cell):
    """A run that takes its process with it, as one without memory does."""
    os._exit(3)


def is_refused(cell):
    """A run that cannot be begun."""
    raise Refused(f"{cell.label} cannot be run")


def test_a_cell_is_a_run_of_its_settings(read):
    """Two rounds of tuning on a sixth of the 1437 training scans: evaluated, counted, and the same when done again."""
    cell = Plan(read(), lambda cell: None, ["FedCM"]).missing()[0]
    one, two = RunCell()(cell), RunCell()(cell)
    assert (len(one.rounds), one.diverged, len(one.accuracies)) == (2, None, 2)
    assert [row.model for row in one.rounds] == [row.model for row in two.rounds]
    assert one.rounds[0].bytes_down == 2 * one.rounds[0].bytes_up > 0


def test_a_run_that_diverges_is_a_result(read):
    """A rate of 1e30 leaves no finite number; the rounds before are kept, here none."""
    table = read(("learning_rates = [0.1, 0.2, 0.4]", "learning_rates = [1e30]"))
    result = RunCell()(Plan(table, lambda cell: None, ["FedAvg"]).missing()[0])
    assert (result.diverged, result.rounds) == (0, ())


@pytest.fixture
def new_processes():
    """Those of multiprocessing that other tests have not left running for tests to come."""
    before = set(multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before


def test_workers_finish_a_plan_and_leave_no_process(read, tmp_path, new_processes):
    """Two processes, 13 cells, each told once."""
    plan, told = Plan(read(), CellFolder(tmp_path).load), []
    run_all(plan, Job(stand_in, CellFolder(tmp_path)), 2, lambda cell, result: told.append(cell.digest))
    assert (len(told), len(set(told)), plan.missing()) == (13, 13, [])
    assert new_processes() == set()


@pytest.mark.parametrize(("run", "told"), [(ends_its_process, "ended by itself"), (is_refused, "FedAvg cannot be run")])
def test_what_ends_a_worker_ends_the_comparison(read, tmp_path, run, told, new_processes):
    """In words, and with no process left."""
    with pytest.raises(Refused, match=told):
        run_all(Plan(read(), CellFolder(tmp_path).load), Job(run, CellFolder(tmp_path)), 1, lambda cell, result: None)
    assert new_processes() == set()


def test_an_interruption_keeps_what_is_finished(read, tmp_path, new_processes):
    """Ctrl-C after the second cell: its files are there, its processes are not, and another is left alone."""

    def interrupt(cell, result):
        if len(list(tmp_path.glob("*.json"))) >= 2:
            raise KeyboardInterrupt

    plan = Plan(read(), (folder := CellFolder(tmp_path)).load)
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        run_all(plan, Job(stand_in, folder), 1, interrupt)
    assert (len(plan.missing()) < 9, new_processes()) == (True, {other})
    other.kill()
    other.join()


def test_the_command_leaves_everything_and_does_nothing_twice(read, tmp_path, fl):
    """One method of the digits; a second call runs nothing and gives the same files."""
    read()
    arguments = ("compare", tmp_path / "small.toml", "--out", tmp_path / "out", "--only", "FedAvg", "--json")
    first = fl(*arguments)
    assert first.exit_code == Exit.OK, first.stderr
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.*")}
    assert {"results.csv", "summary.csv", "summary.json", "tables.md", "accuracy-by-rounds.png"} <= files.keys()
    again = fl(*arguments)
    assert (json.loads(again.stdout)["cells_done"], again.stderr) == (5, "")
    assert (tmp_path / "out" / "results.csv").read_bytes() == files["results.csv"]


def test_a_file_that_is_not_there_is_told(fl):
    """As a wrong command line."""
    done = fl("compare", "nowhere.toml")
    assert (done.exit_code, "there is no file nowhere.toml" in done.stderr) == (Exit.MISUSED, True)


def test_a_page_that_cannot_be_filled_in_is_told_before_anything_runs(read, tmp_path, fl):
    """There is none of this name: no run is made first."""
    read()
    done = fl("compare", tmp_path / "small.toml", "--out", tmp_path / "out", "--page", "none.md")
    assert (done.exit_code, "--page: none.md cannot be read" in done.stderr) == (Exit.MISUSED, True)
    assert not list((tmp_path / "out" / "cells").iterdir())
