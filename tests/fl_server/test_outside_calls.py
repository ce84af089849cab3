"""Calls of code from outside: their end, their threads, and what the next process knows of them."""

from __future__ import annotations

import asyncio
import ctypes
import json
import sys
import threading
import time
from pathlib import Path

import pytest

from algorithms import AlgorithmError
from fl_server.outside_calls import MOST_ENDS, CallTimedOut, OutsideCalls, OutsideCode
from fl_tasks import TaskError

CODE = OutsideCode("r", "reducer mine:median")
REPORT = """Fatal Python error: Segmentation fault

Thread 0x0000000000000001 (most recent call first):
  File "/x/other.py", line 1 in other

Current thread 0x{thread:016x} (most recent call first):
  File "{ctypes}", line 519 in string_at
  File "/home/me/mine.py", line 7 in reduce

Extension modules: numpy (total: 1)
"""


def note(folder: Path, thread: int, ends: int = 0, *, loading: bool = False) -> None:
    """The note that a process leaves which ends during a call."""
    (folder / "r.json").write_text(
        json.dumps({"thread": thread, "names": CODE.names, "loading": loading, "ends": ends})
    )


def crashed(folder: Path) -> dict[str, str]:
    """What the next process finds."""
    return OutsideCalls(folder)._find_crashed()


def notes(folder: Path) -> list[str]:
    """The names of all notes."""
    return [path.name for path in folder.glob("*.json")]


async def test_a_call_has_a_result_or_an_error_and_leaves_no_note(tmp_path: Path) -> None:
    """Results, exceptions and what ends a thread reach the caller; the note is there during the call alone."""
    calls = OutsideCalls(tmp_path)
    assert await calls.call(CODE, 60.0, lambda: notes(tmp_path)) == ["r.json"]

    def fails() -> None:
        raise AlgorithmError("no")

    with pytest.raises(AlgorithmError, match="no"):
        await calls.call(CODE, 60.0, fails)
    with pytest.raises(TaskError, match="raised SystemExit: 4"):
        await calls.call(CODE, 60.0, lambda: sys.exit(4))
    assert not notes(tmp_path)


async def test_an_endless_loop_is_left_and_its_thread_ends(tmp_path: Path) -> None:
    """After its time the caller gets an error with the place; an exception ends the thread, which runs Python."""
    calls, threads = OutsideCalls(tmp_path), list[threading.Thread]()

    def spins() -> None:
        threads.append(threading.current_thread())
        while True:
            time.sleep(0.001)

    with pytest.raises(CallTimedOut, match=r"reducer mine:median did not end within 0.2 s"):
        await calls.call(CODE, 0.2, spins)
    await asyncio.to_thread(threads[0].join, 60.0)
    assert not threads[0].is_alive()
    assert not notes(tmp_path)


def test_the_thread_of_the_report_names_the_run(tmp_path: Path) -> None:
    """A crash in the thread of a call is that run's, with the place; one in another thread is not."""
    (tmp_path / "crash.txt").write_text(REPORT.format(thread=77, ctypes=ctypes.__file__))
    note(tmp_path, 78)
    assert crashed(tmp_path) == {}
    note(tmp_path, 77)
    why = (
        "reducer mine:median ended the coordinator's process: Segmentation fault (/home/me/mine.py, line 7, in reduce)"
    )
    assert crashed(tmp_path) == {"r": why}
    assert not (tmp_path / "r.json").exists()
    note(tmp_path, 77, loading=True)
    calls = OutsideCalls(tmp_path)
    calls._find_crashed()
    assert calls.crashed_loading == {CODE.names: why}


async def test_ends_without_a_report_count_until_a_round_is_committed(tmp_path: Path) -> None:
    """The third end in a row is that run's. A start without a call counts nothing, nor does a call end the row."""
    note(tmp_path, 77)
    for _ in range(2 * MOST_ENDS):
        assert crashed(tmp_path) == {}
    note(tmp_path, 77, ends=MOST_ENDS - 2)
    calls = OutsideCalls(tmp_path)
    assert calls._find_crashed() == {}
    await calls.call(CODE, 60.0, lambda: None)
    assert json.loads((tmp_path / "r.json").read_text())["ends"] == MOST_ENDS - 1
    calls.forget_ends(CODE.run_id)
    assert notes(tmp_path) == []
    note(tmp_path, 77, ends=MOST_ENDS - 1)
    assert "ended the coordinator's process 3 times" in crashed(tmp_path)["r"]


def test_a_torn_note_is_none(tmp_path: Path) -> None:
    """A note that a crash cut off is removed."""
    (tmp_path / "r.json").write_text('{"thread": 7')
    assert crashed(tmp_path) == {}
    assert not (tmp_path / "r.json").exists()
