"""`live`: a life of depth 2 from its plan to its checks, with the product's log."""

from __future__ import annotations

import gc
import shutil
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import ref

import structlog
import torch

from fl_server.run import control, record
from tests.deterministic import clocks
from tests.deterministic.checks import check
from tests.deterministic.effects import installed
from tests.deterministic.life import Life
from tests.deterministic.loop import CURRENT, Killed, StuckLoop, virtual_loop
from tests.deterministic.pauses import told_pauses
from tests.deterministic.plan import Plan
from tests.deterministic.seen import Seen

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own is made there
_FOLDERS = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
_FAULTS_LOGGED = frozenset(
    {"rpc_failed", "run_failed", "work_broken", "attendance_broken", "event_broken", "change_broken",
     "state_dir_check_broken", "end_incomplete", "privacy_account_lost"}
)  # fmt: skip
"""Lines of the log that only a fault of the product writes."""


@dataclass
class Result:
    """What became of a life."""

    plan: Plan
    seen: Seen
    error: str = ""
    trace: str = ""


def live(plan: Plan) -> Result:
    """Live the life of a plan, and check it."""
    clocks.require_first()
    torch.set_num_threads(1)
    hook, before = sys.unraisablehook, structlog.get_config()
    sys.unraisablehook = lambda _: None  # of coroutines of dead processes, which are collected half way
    gc.disable()
    try:
        result, life = _live(plan)
    finally:
        structlog.configure(processors=[_dropped], cache_logger_on_first_use=False)
        with warnings.catch_warnings(action="ignore"):  # of coroutines that a dead process never began
            gc.collect()  # ends the coroutines of dead processes; only the next one frees what they held
            gc.collect()
        gc.freeze()  # what stays need not be searched after each life
        gc.enable()
        structlog.configure(**before)
        sys.unraisablehook = hook
    if life() is not None and not result.error:
        raise RuntimeError("the life is over and something holds it: the memory of many lives would grow")
    return result


def _live(plan: Plan) -> tuple[Result, ref[Life]]:
    """The result, and whether the life is still held."""
    folder = Path(tempfile.mkdtemp(prefix="life-", dir=_FOLDERS))
    try:
        with virtual_loop(plan.seed) as loop:
            life, error = Life(plan, folder, loop), ""
            structlog.configure(processors=[partial(_keep, life)], cache_logger_on_first_use=False)
            advance = mock.patch.object(control, "advance", life.uptime.advance)
            retries = mock.patch.object(record, "write_when_possible", partial(told_pauses, life.seen))
            with installed(life.effects, loop, plan.seed), advance, retries, life.watched():
                try:
                    loop.run_until_complete(life.live())
                    error = "; ".join(life.seen.violations)
                    if not error:
                        check(life)
                        error = "; ".join(life.seen.violations)
                except (AssertionError, StuckLoop) as failure:
                    error = "; ".join((*life.seen.violations, str(failure)))
                _bury(life)
            return Result(plan, life.seen, error), ref(life)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bury(life: Life) -> None:
    """Close what the processes have open. What is returned must hold none of them, or no life's memory is ever free."""
    for process in (*life.processes.values(), *life.graveyard):
        process.kill()
    life.seen.had_run.clear()


def _dropped(*_: Any) -> Any:
    raise structlog.DropEvent


def _keep(life: Life, _: Any, level: str, fields: Any) -> Any:
    """Keep a line of the log. Those that only a fault of the product writes are violations."""
    process = CURRENT.get()
    if process is not None and not process.alive:
        raise structlog.DropEvent
    name, who = fields.get("event"), process.name if process else "-"
    info = fields.pop("exc_info", None)
    error = sys.exc_info()[1] if info is True else info
    where = "".join(traceback.format_exception(error)[-4:]) if isinstance(error, BaseException) else ""
    if name in _FAULTS_LOGGED and not isinstance(error, Killed):
        life.seen.violations.append(f"the log has no line of a fault: {who} {fields} {where}")
    life.note(f"{who} {level} {fields} {where}")
    raise structlog.DropEvent
