"""Starts torchrun with ranks, and ends what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[4]
TASKS = Path(__file__).parents[2]
SIMULATE = ("-m", "fl_ops", "simulate", "run.toml", "--json")
PYTHON = (sys.executable,)
TORCHRUN = (*PYTHON, "-m", "torch.distributed.run")
"""The command `torchrun` of this interpreter."""


def standalone(ranks: int) -> Sequence[str]:
    """Before the options of Python: starts so many ranks on this machine; 0 is one process without torchrun."""
    return (*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)) if ranks else PYTHON


class Launches:
    """The processes of a test; a context manager.

    At its end those that run are killed with their ranks: ranks are in sessions of their own, so they do not end with
    a launcher that is killed.
    """

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._started:
            for each in [*(children_of(process) if process.poll() is None else []), process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            process.communicate()

    def start(self, folder: Path, *command: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command in a folder. The tests and their tasks are importable in it."""
        environment = {
            **os.environ,
            "PYTHONPATH": f"{TASKS}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
            **(variables or {}),
        }
        process = subprocess.Popen(
            command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a running process has started."""
    return [int(one) for one in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
