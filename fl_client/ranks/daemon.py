"""The other ranks of a daemon, which is rank 0: started and ended with the daemon, and watched while they work.

Each is a process of its own with the daemon's settings. It ends as soon as its standard input is closed, so none lives
longer than the daemon, however that ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread

import structlog
import torch
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch's types lack it

from algorithms.base import Memory
from fl_client.errors import task_error
from fl_client.ranks.group import Bundles, Group, give, join
from fl_client.settings.config import ClientConfig
from protos.fl.v1 import training_pb2

log = structlog.get_logger()

START_S = 600.0
"""The longest time until all ranks have loaded the task and its data."""
_END_S, _CHECK_S, _SHOWN = 5.0, 0.05, 2000
"""Seconds for a rank to end by itself; between two looks at the processes; characters of a log in a message."""


class Ranks(Group):
    """The ranks of one daemon, as rank 0. One thread at a time."""

    def __init__(self, config: ClientConfig, size: int, device: torch.device) -> None:
        """size: of all ranks, 2 or more. device: of rank 0."""
        super().__init__(0, size)
        self._config, self._device, self._folder = config, device, config.state_dir / "ranks"
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._store: TCPStore | None = None
        self._messages: dist.ProcessGroup | None = None
        self._start()

    @contextmanager
    def working(self, assignment: training_pb2.Assignment, bundles: Bundles, state: Memory | None) -> Iterator[None]:
        """Within the context all ranks train for an assignment. An error in it ends them; the next work starts others.

        Raises WorkFailed if a rank has ended, with its number and the end of its log.
        """
        try:
            messages = self._messages or self._join()
            with self._watched():
                give(messages, assignment, bundles, state)
                yield
        except BaseException as error:
            self._end(error)
            raise

    def close(self) -> None:
        """End all ranks."""
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes.values():
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._messages is not None:
            dist.destroy_process_group()
        self._processes, self._store, self._messages = {}, None, None

    def _start(self) -> TCPStore:
        """Start the other ranks, which load the task while this one goes on."""
        self._folder.mkdir(exist_ok=True)
        wait = timedelta(seconds=START_S)
        self._store = store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=wait)
        order = {"config": self._config.model_dump(mode="json"), "size": self.size, "port": store.port}
        for rank in range(1, self.size):
            with self._log(rank).open("w") as output:
                self._processes[rank] = started = subprocess.Popen(
                    [sys.executable, "-P", "-m", "fl_client.ranks.member"],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            if started.stdin is not None:
                started.stdin.write(json.dumps({**order, "rank": rank}) + "\n")
                started.stdin.flush()
        return store

    def _join(self) -> dist.ProcessGroup:
        """Wait until all ranks are ready: one that ends while others join is not noticed by torch."""
        started, store = time.monotonic(), self._store or self._start()
        while not store.check([f"ready/{rank}" for rank in self._processes]):
            if self._ended() or time.monotonic() - started > START_S:
                raise RuntimeError(f"expected {self.size} ranks within {START_S:g} s")
            time.sleep(_CHECK_S)
        self._messages = join(store, self, self._device)
        log.info("ranks_joined", ranks=self.size, seconds=round(time.monotonic() - started, 1))
        return self._messages

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """NCCL does not notice a process that ended, so its sums are aborted. gloo raises by itself."""
        if self._device.type != "cuda":
            yield
            return
        done = Event()

        def watch() -> None:
            while not done.wait(_CHECK_S):
                if self._ended() and dist.group.WORLD is not None:
                    dist.group.WORLD.abort()
                    return

        Thread(target=watch, name="ranks", daemon=True).start()
        try:
            yield
        finally:
            done.set()

    def _ended(self) -> dict[int, int]:
        """The exit codes of ranks that have ended, by rank."""
        return {rank: code for rank, it in self._processes.items() if (code := it.poll()) is not None}

    def _end(self, error: BaseException) -> None:
        """End the ranks after an error. Raises WorkFailed if it is due to one of them."""
        until = time.monotonic() + 1.0  # a closed connection may be noticed before the end of its process
        while isinstance(error, Exception) and not (ended := self._ended()) and time.monotonic() < until:
            time.sleep(_CHECK_S)
        ended = self._ended()
        self.close()
        log.warning("ranks_ended", reason=type(error).__name__, todo="the next work starts them again")
        if ended:
            rank, code = min(ended.items())
            path = self._log(rank)
            raise task_error(
                f"rank {rank} of {self.size} ended with {_shown(code)}; the end of {path}:"
                f" {path.read_text(errors='replace')[-_SHOWN:].strip() or 'empty'}"
            ) from error

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"


def _shown(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"
