"""Real runs of the digits task: in this process, in workers, and by the command."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import pytest

from fl_ops.compare.cells import Cell, CellFolder, CellResult, RoundRow
from fl_ops.compare.plan import Plan
from fl_ops.compare.progress import Costs, Progress, Sharing
from fl_ops.compare.run_cell import Means, OnRound, RunCell
from fl_ops.compare.workers import Job, Work, run_all, shares
from fl_ops.errors import Exit, Refused
from fl_ops.simulate.engine_choice import EngineRequest
from tests.fl_ops.compare.conftest import Read
from tests.fl_ops.conftest import Fl
from tests.marks import slow_except

NewProcesses = Callable[[], set[BaseProcess]]


ROUND = RoundRow(0, 2, 1.0, 0.5, 1.0, 10, 10, 0.0, "")


def ignore(_row: RoundRow) -> None:
    """Nobody watches the rounds."""


def finish_at_once(cell: Cell, on_round: OnRound, means: Means) -> CellResult:
    """A run that takes no time. Workers import it by name."""
    on_round(ROUND)
    return CellResult((ROUND,), 0.0)


def never_end(cell: Cell, on_round: OnRound, means: Means) -> NoReturn:
    """A run that takes longer than any test."""
    while True:
        time.sleep(60)


def never_end_with_files(cell: Cell, on_round: OnRound, means: Means) -> NoReturn:
    """As never_end, with a temporary folder as a simulation has them."""
    with TemporaryDirectory(prefix="held-"):
        on_round(ROUND)
        while True:
            time.sleep(60)


def end_process(cell: Cell, on_round: OnRound, means: Means) -> NoReturn:
    """A run that ends its process, as the kernel does when memory is short."""
    os._exit(3)


def refuse(cell: Cell, on_round: OnRound, means: Means) -> NoReturn:
    """A run that cannot be started."""
    raise Refused(f"{cell.label} cannot be run")


def untimed(result: CellResult) -> list[RoundRow]:
    """The rounds without their times."""
    return [replace(row, seconds=0.0) for row in result.rounds]


def nothing_done(cell: Cell) -> None:
    """No cell has a result."""


def test_a_cell_is_a_run_of_its_settings(read: Read) -> None:
    """Two rounds of tuning with a sixth of the 1437 training scans withheld; a repetition has the same models."""
    cell = Plan(read(), nothing_done, ["FedCM"]).missing()[0]
    one, two = RunCell()(cell, ignore, Means()), RunCell()(cell, ignore, Means())
    assert (len(one.rounds), one.diverged, len(one.accuracies)) == (2, None, 2)
    assert [row.model for row in one.rounds] == [row.model for row in two.rounds]
    assert one.rounds[0].bytes_down == 2 * one.rounds[0].bytes_up > 0


@pytest.mark.parametrize("rate", ["1e30", "1e38"])
def test_a_run_that_diverges_is_a_result(read: Read, rate: str) -> None:
    """A huge rate makes values that are not finite, in the clients' updates or in the sum; no round is committed."""
    table = read(("learning_rates = [0.1, 0.2, 0.4]", f"learning_rates = [{rate}]"))
    result = RunCell()(Plan(table, nothing_done, ["FedAvg"]).missing()[0], ignore, Means())
    assert (result.diverged, result.rounds) == (0, ())


def test_a_run_that_fails_otherwise_is_an_error(read: Read) -> None:
    """More clients per round than there are: the run fails, and this is no result."""
    table = read(("stop = { rounds = 3 }", "stop = { rounds = 3 }\nround = { clients_per_round = 5 }"))
    with pytest.raises(Refused, match="FedAvg, tuning with seed 9: expected 5 clients or more"):
        RunCell()(Plan(table, nothing_done, ["FedAvg"]).missing()[0], ignore, Means())


class Seen:
    """A watch that remembers (digest, "round" or "cell") in order."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def round_done(self, cell: Cell, row: RoundRow) -> None:
        """See Watch."""
        self.events.append((cell.digest, "round"))

    def cell_done(self, cell: Cell, result: CellResult) -> None:
        """See Watch."""
        self.events.append((cell.digest, "cell"))

    def digests(self) -> list[str]:
        """The finished cells."""
        return [digest for digest, what in self.events if what == "cell"]


@pytest.fixture
def new_processes() -> NewProcesses:
    """The child processes that were started since the beginning of the test."""
    before = set[BaseProcess](multiprocessing.active_children())
    return lambda: set(multiprocessing.active_children()) - before


@pytest.mark.slow
@pytest.mark.parametrize(("run", "error"), [(end_process, "ended unexpectedly"), (refuse, "FedAvg cannot be run")])
def test_a_failing_worker_ends_the_comparison(
    read: Read, tmp_path: Path, run: Callable[[Cell, OnRound, Means], NoReturn], error: str, new_processes: NewProcesses
) -> None:
    """The error has a text, and no process is left."""
    folder = CellFolder(tmp_path)
    with pytest.raises(Refused, match=error):
        run_all(Work(Plan(read(), folder.load), Job(run, folder)), Seen())
    assert new_processes() == set()


@pytest.mark.slow
def test_an_interruption_keeps_finished_cells(read: Read, tmp_path: Path, new_processes: NewProcesses) -> None:
    """Ctrl-C after the second cell: its files are kept, its processes end, and other processes are not touched."""

    class Interrupt(Seen):
        def cell_done(self, cell: Cell, result: CellResult) -> None:
            if len(list(tmp_path.glob("*.json"))) >= 2:
                raise KeyboardInterrupt

    folder = CellFolder(tmp_path)
    plan = Plan(read(), folder.load)
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        run_all(Work(plan, Job(finish_at_once, folder)), Interrupt())
    assert (len(plan.missing()) < 9, new_processes()) == (True, {other})
    other.kill()
    other.join()


@pytest.mark.slow
def test_every_round_is_reported_before_its_cell(read: Read, tmp_path: Path) -> None:
    """Five cells with a round each; the costs learn the rounds, too."""
    folder, seen = CellFolder(tmp_path), Seen()
    work = Work(Plan(read(), folder.load, ["FedAvg"]), Job(finish_at_once, folder), processes=2)
    assert run_all(work, seen)
    assert dict(seen.events) == dict.fromkeys(seen.digests(), "cell")
    assert [what for _, what in seen.events].count("round") == len(seen.digests()) == 5
    assert work.costs.of_round("FedAvg") == 0.0


def test_at_the_time_limit_running_cells_are_given_up(read: Read, tmp_path: Path, new_processes: NewProcesses) -> None:
    """No cell ends: the call does, without a process or a file."""
    folder = CellFolder(tmp_path)
    work = Work(Plan(read(), folder.load), Job(never_end, folder), seconds=0.2)
    assert not run_all(work, Seen())
    assert (new_processes(), list(tmp_path.glob("*.json"))) == (set(), [])


@pytest.mark.slow
def test_a_cell_that_is_given_up_leaves_no_temporary_file(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_processes: NewProcesses
) -> None:
    """Ctrl-C after the first round, while the cell has a folder: its process removes the folder and ends."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    seen: list[int] = []

    class Interrupt(Seen):
        def round_done(self, cell: Cell, row: RoundRow) -> None:
            seen.append(len(list(scratch.glob("held-*"))))
            raise KeyboardInterrupt

    folder = CellFolder(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_all(Work(Plan(read(), folder.load), Job(never_end_with_files, folder)), Interrupt())
    assert (seen, list(scratch.glob("held-*")), new_processes()) == ([1], [], set())


@pytest.mark.parametrize(
    ("free", "cells", "expected"), [(2, 5, [1, 1]), (4, 1, [4]), (4, 3, [2, 1, 1]), (1, 0, []), (0, 3, [])]
)
def test_cells_share_the_free_processes(free: int, cells: int, expected: list[int]) -> None:
    """One process for each cell while there are cells enough; at the end all processes work on the last ones."""
    assert shares(free, cells) == expected


def test_a_cell_has_the_same_models_with_two_workers(read: Read) -> None:
    """The rounds of FedCM are equal but for their time."""
    cell = Plan(read(), nothing_done, ["FedCM"]).missing()[0]
    one, two = (RunCell()(cell, ignore, Means(workers)) for workers in (1, 2))
    assert untimed(one) == untimed(two)


def test_a_cell_in_lockstep_is_another_cell(read: Read) -> None:
    """Its file has another name, its settings name engine and device, and its accuracies are about the same."""
    options = EngineRequest("batched", device="cpu", strategy="grouped").options()
    plain, table = read(), replace(read(), engine=options.arithmetic)
    [one, *_], [other, *_] = (Plan(planned, nothing_done, ["FedCM"]).missing() for planned in (plain, table))
    assert one.digest != other.digest
    assert other.settings["engine"] == {
        "clients": "in lockstep", "device": "cpu", "strategy": "grouped", "group": 0, "precision": "float32",
    }  # fmt: skip
    expected = RunCell()(one, ignore, Means()).accuracies
    assert RunCell(engine=options)(other, ignore, Means()).accuracies == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("rounds", slow_except([1, 2], 1))
def test_a_cell_that_was_given_up_continues_where_it_was(read: Read, tmp_path: Path, rounds: int) -> None:
    """SystemExit after some of the two rounds, as at a time limit: the other rounds follow, with the same models."""
    cell, means = Plan(read(), nothing_done, ["FedCM"]).missing()[0], Means(1, tmp_path / "saved")

    def give_up(row: RoundRow) -> None:
        if row.round + 1 == rounds:
            raise SystemExit

    with pytest.raises(SystemExit):
        RunCell()(cell, give_up, means)
    seen: list[int] = []
    continued = RunCell()(cell, lambda row: seen.append(row.round), means)
    whole = RunCell()(cell, ignore, Means())
    assert seen == list(range(rounds, 2))
    assert [replace(row, seconds=0.0) for row in continued.rounds] == [
        replace(row, seconds=0.0) for row in whole.rounds
    ]


def test_a_saved_state_that_cannot_be_continued_is_dropped(read: Read, tmp_path: Path) -> None:
    """The state is that of another cell: the run begins again and has the same models."""
    mine, other = Plan(read(), nothing_done, ["FedCM"]).missing()[:2]
    means = Means(1, tmp_path / "saved")
    RunCell()(other, ignore, means)
    again, whole = RunCell()(mine, ignore, means), RunCell()(mine, ignore, Means())
    assert [row.model for row in again.rounds] == [row.model for row in whole.rounds]


@pytest.mark.slow
def test_a_comparison_in_pieces(read: Read, tmp_path: Path, fl: Fl) -> None:
    """The first call is too short for all cells: exit code 8, and what is left on stderr. A second one ends it."""
    read()
    arguments = ("compare", tmp_path / "small.toml", "--out", tmp_path / "out", "--only", "FedAvg")
    first = fl(*arguments, "--minutes", "0.01")
    assert first.exit_code == Exit.WORK_LEFT
    assert "stopped by --minutes: 0 cells finished, about 5 cells with 12 rounds" in first.stderr
    assert "about 5 cells not done" in first.stdout
    second = fl(*arguments)
    assert (second.exit_code, "5 cells. " in second.stdout) == (Exit.OK, True)


@pytest.mark.slow
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


def test_cells_that_finish_together_are_counted_one_by_one(read: Read, tmp_path: Path) -> None:
    """Two workers have written their files before the first of them is reported: the counts are 1 and 2."""
    folder = CellFolder(tmp_path)
    plan = Plan(read(), folder.load)
    lines: list[str] = []
    progress = Progress(plan, Costs(), 2, lines.append)
    cells = plan.missing()[:2]
    for cell in cells:
        folder.save(cell, finish_at_once(cell, ignore, Means()))
    for cell in cells:
        progress.cell_done(cell, finish_at_once(cell, ignore, Means()))
    assert [line.split()[1] for line in lines] == ["1", "2"]


def test_the_time_left_counts_the_rounds_that_are_done(read: Read, tmp_path: Path) -> None:
    """FedAvg: 3 cells of 2 rounds and 2 of 3, at 10 s a round in two processes; then one round is done."""
    folder = CellFolder(tmp_path)
    plan, costs = Plan(read(), folder.load, ["FedAvg"]), Costs()
    progress, cell = Progress(plan, costs, 2, lambda line: None), plan.missing()[0]
    assert (progress.time_left(), progress.running()) == ("", "")
    costs.add(cell, 10.0)
    assert progress.time_left() == "1 min 00 s"
    progress.round_done(cell, ROUND)
    assert (progress.time_left(), progress.running()) == (
        "55.0 s",
        "FedAvg, tuning, seed 9, rate 0.1: 1 of 2 rounds, 50.0 %",
    )


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


@pytest.mark.parametrize(("beside", "told"), [(1.9, ["1.9 times as long as alone"]), (1.4, [])])
def test_runs_that_get_in_each_others_way_are_told(beside: float, told: list[str]) -> None:
    """Two runs on one GPU: the first begins alone; the first rounds of each are not counted."""
    lines: list[str] = []
    sharing = Sharing(2, lines.append)
    for seconds in (30.0, 30.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        assert not sharing.begins_others
        sharing.add("a", seconds, {"a"})
    assert sharing.begins_others
    for number in range(8):
        sharing.add("a", beside if number > 2 else 30.0, {"a", "b"})
        sharing.add("b", 1.0, {"a", "b"})
    assert len(lines) == len(told)
    assert all(text in line and "--processes 2" in line for text, line in zip(told, lines, strict=True))


def test_runs_begin_beside_one_that_has_ended() -> None:
    """A first run of few rounds tells nothing, and the others begin."""
    sharing = Sharing(2, pytest.fail)
    sharing.add("a", 1.0, {"a"})
    sharing.ended("a")
    assert sharing.begins_others


def many_rounds(cell: Cell, on_round: OnRound, means: Means) -> CellResult:
    """A run of many short rounds. Workers import it by name."""
    for number in range(40):
        on_round(replace(ROUND, round=number))
        time.sleep(0.02)
    return CellResult((ROUND,), 0.0)


def test_the_first_run_on_a_shared_device_begins_alone(read: Read, tmp_path: Path) -> None:
    """The rounds that are measured alone are all of one cell; then every cell is run."""
    seen: list[str] = []

    class Seen(Progress):
        def round_done(self, cell: Cell, row: RoundRow) -> None:
            seen.append(cell.digest)

    folder = CellFolder(tmp_path)
    plan = Plan(read(), folder.load)
    work = Work(plan, Job(many_rounds, folder), 2, sharing=Sharing(2, pytest.fail))
    assert run_all(work, Seen(plan, work.costs, 2, lambda line: None))
    assert len({*seen[: Sharing.MEASURED + Sharing.UNCOUNTED]}) == 1
    assert len({*seen}) > 2
