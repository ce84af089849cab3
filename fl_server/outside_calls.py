"""Calls of methods and reducers from outside, which run in this process: each in a thread of its own, with an end.

A thread cannot be killed. One that does not end in its time is left: its run fails, and an exception is raised in it,
which ends code that executes Python. What still does not end takes its processor time until the process ends, which
waits for none of these threads.

Code that ends the whole process, as a segmentation fault does, is found at the next start: a note on disk names the run
whose code is called and its thread, and Python's fault handler writes the thread that crashed.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import json
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import FrameSummary, StackSummary
from typing import TextIO, TypeVar

import structlog

from algorithms import AlgorithmError
from algorithms.outside_code import described, place_of_frames, place_of_thread
from fl_common.units import counted
from fl_common.waiting import shielded
from fl_tasks import TaskError

log = structlog.get_logger()

R = TypeVar("R")

MOST_ENDS = 3
"""Ends of the process during calls of one run, without a committed round in between, after which the run fails. It
counts ends that leave no report: exit codes and SIGKILL, which may be the machine's."""
_REPORT = "crash.txt"
_WHAT = re.compile(r"Fatal Python error: (.+)")
_THREAD = re.compile(r"Current thread 0x(?P<id>[0-9a-f]+)(?P<stack>.*?)(\n\n|$)", re.DOTALL)
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


class CallTimedOut(AlgorithmError):
    """Code from outside did not end in its time. The machine may have been slow."""


class _Left(SystemExit):
    """Raised in a thread that nobody waits for any more; threads end with it silently."""


@dataclass(frozen=True, slots=True)
class OutsideCode:
    """The code from outside of one run that its method or its reducer is."""

    run_id: str
    names: str
    """Names for messages, as "algorithm mine:method". Empty: both are built in."""
    loading: bool = False
    """Whether it is being loaded, as every run with the same names does at a start."""


class OutsideCalls:
    """Makes the calls, and knows which runs ended an earlier process. Lives on the event loop."""

    def __init__(self, folder: Path) -> None:
        """folder: for notes and the report, of this coordinator alone."""
        self._folder = folder
        self._ends: dict[str, int] = {}
        """Ends of earlier processes during calls of a run, without a committed round since."""
        self._report: TextIO | None = None
        self.crashed: dict[str, str] = {}
        """Runs whose code ended an earlier process, each with the reason."""
        self.crashed_loading: dict[str, str] = {}
        """The same by `OutsideCode.names`, of code that did so while it was loaded: it would for each of its runs."""

    def start(self) -> None:
        """Find the runs that ended an earlier process, and have a crash of this one reported. Blocking.

        Raises OSError if the folder cannot be written.
        """
        self.crashed = self._find_crashed()
        self._report = (self._folder / _REPORT).open("w", encoding="utf-8")
        faulthandler.enable(self._report)

    def _find_crashed(self) -> dict[str, str]:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        crash = _Crash.read(self._folder / _REPORT)
        if crash is not None:
            log.error("earlier_process_crashed", what=crash.what, place=crash.place)
        problems = {}
        for path in sorted(self._folder.glob("*.json")):
            if (note := _read_note(path)) is None:
                path.unlink()
                continue
            code, thread, ends = note
            run_id = code.run_id
            ends += thread > 0
            ended = f"{code.names} ended the coordinator's process"
            if crash is not None and crash.thread == thread:
                problems[run_id] = f"{ended}: {crash.what}{f' ({crash.place})' if crash.place else ''}"
            elif ends >= MOST_ENDS:
                problems[run_id] = f"{ended} {counted(ends, 'time')}, one after the other, without a crash report"
            else:
                self._ends[run_id] = ends
                self._write_note(code, 0)
                continue
            if code.loading:
                self.crashed_loading[code.names] = problems[run_id]
            path.unlink()
        return problems

    def close(self) -> None:
        """The process ends as it should, whatever its threads still do."""
        if self._report is not None:
            faulthandler.disable()
            self._report.close()
        for path in self._folder.glob("*.json"):
            path.unlink(missing_ok=True)

    def forget_ends(self, run_id: str) -> None:
        """The run has committed a round or is over: earlier ends of the process were not its own."""
        if self._ends.pop(run_id, None) is not None:
            self._remove_note(run_id)

    async def call(self, code: OutsideCode, seconds: float, work: Callable[[], R]) -> R:
        """Do work that calls the code. Raises CallTimedOut if it does not end in its time."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[R] = loop.create_future()
        result.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may be gone

        def answer(method: Callable[..., None], value: object) -> None:
            if not result.done():
                method(value)

        def run() -> None:
            self._write_note(code, threading.get_ident())
            try:
                ended: tuple[Callable[..., None], object] = (result.set_result, guarded(work))
            except _Left:
                return
            except Exception as error:  # noqa: BLE001 - the caller gets it
                ended = (result.set_exception, error)
            finally:
                self._end_note(code)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answer, *ended)

        thread = threading.Thread(target=run, name=f"outside-{code.run_id}", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(seconds):
                return await shielded(result)
        except TimeoutError:
            if result.done():
                raise
            place = _leave(thread)
            log.error("outside_code_left", run=code.run_id, code=code.names, seconds=seconds, place=place)
            raise CallTimedOut(
                f"{code.names} did not end within {seconds:g} s{f' (at {place})' if place else ''}"
            ) from None
        except asyncio.CancelledError:
            _leave(thread)
            raise

    def _write_note(self, code: OutsideCode, thread: int) -> None:
        note = {**asdict(code), "thread": thread, "ends": self._ends.get(code.run_id, 0)}
        try:
            (self._folder / f"{code.run_id}.json").write_text(json.dumps(note), encoding="utf-8")
        except OSError as error:  # it is needed after a crash alone
            log.warning("note_not_written", run=code.run_id, error=str(error))

    def _end_note(self, code: OutsideCode) -> None:
        """Only earlier ends remain after a call. A start loads the run and makes its model before it ends again."""
        if code.run_id in self._ends:
            self._write_note(code, 0)
        else:
            self._remove_note(code.run_id)

    def _remove_note(self, run_id: str) -> None:
        with suppress(OSError):
            (self._folder / f"{run_id}.json").unlink(missing_ok=True)


def guarded(work: Callable[[], R]) -> R:
    """Do work that may call code from outside: a method's step, a reducer, a task.

    What would end the event loop or cancel a task of it, as SystemExit or CancelledError, becomes an error of the work.
    """
    try:
        return work()
    except (Exception, _Left):
        raise
    except BaseException as raised:
        raise TaskError(f"code from outside raised {described(raised)}") from raised


def _leave(thread: threading.Thread) -> str:
    """Have a thread end as soon as it executes Python. Returns the place in the author's code where it is."""
    if not thread.is_alive() or thread.ident is None:
        return ""
    place = place_of_thread(thread.ident)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Left))
    return place


def _read_note(path: Path) -> tuple[OutsideCode, int, int] | None:
    """(code, thread, earlier ends) of a note; None for one that is torn."""
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
        code = OutsideCode(path.stem, str(note["names"]), bool(note["loading"]))
        return code, int(note["thread"]), int(note["ends"])
    except (ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class _Crash:
    """What the fault handler wrote when a process crashed."""

    what: str
    thread: int
    place: str
    """File, line and function of the author's innermost frame; empty if there is none."""

    @classmethod
    def read(cls, path: Path) -> _Crash | None:
        """The crash in a report; None if the process did not crash."""
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        what, thread = _WHAT.search(text), _THREAD.search(text)
        if what is None or thread is None:
            return None
        frames = [FrameSummary(file, int(line), name) for file, line, name in _FRAME.findall(thread["stack"])]
        return cls(what[1], int(thread["id"], 16), place_of_frames(StackSummary.from_list(frames[::-1])))
