"""Starts torchrun with ranks, and ends what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[4]
TASKS = Path(__file__).parents[2]
SIMULATE = ("-m", "fl_ops", "simulate", "run.toml", "--json")


def torchrun(*options: str) -> list[str]:
    """The command `torchrun` with these options, of this interpreter."""
    return ["-m", "torch.distributed.run", *options]


def standalone(ranks: int) -> list[str]:
    """The command `torchrun` for so many ranks on this machine; nothing for 0, which is a process without torchrun."""
    return torchrun("--standalone", "--nproc-per-node", str(ranks)) if ranks else []


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

    def start(self, folder: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start this interpreter with these arguments in a folder."""
        environment = {
            **os.environ,
            **(variables or {}),
            "PYTHONPATH": f"{TASKS}{os.pathsep}{ROOT}",
            "OMP_NUM_THREADS": "1",
        }
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._started.append(process)
        return process


def children_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that a running process has started."""
    return [int(one) for one in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
