"""The parts that runs share, wired once by `app.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from fl_server.config import ServerConfig
from fl_server.fleet import Fleet
from fl_server.ledger import Ledger
from fl_server.metrics import Metrics
from fl_server.spool import Spool
from fl_server.store.base import StoreError
from fl_server.store.checkpoints import Checkpoints
from protos.traces import UNTRACED, Traces

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Parts:
    """One coordinator's equipment."""

    config: ServerConfig
    ledger: Ledger
    checkpoints: Checkpoints
    spool: Spool
    fleet: Fleet
    metrics: Metrics
    compute: ThreadPoolExecutor
    """Steps, evaluations and checkpoints: what takes a processor for long."""
    io: ThreadPoolExecutor
    """Chunks and checks of uploads."""
    reads: ThreadPoolExecutor
    """What clients can have read from the disk again and again: no upload waits for it."""
    traces: Traces = UNTRACED

    async def in_compute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run something heavy beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.compute, lambda: function(*args, **kwargs))

    async def in_io(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run something that touches an upload's file beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.io, lambda: function(*args, **kwargs))

    async def in_reads(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run something beside the event loop that reads what a client asks for."""
        return await asyncio.get_running_loop().run_in_executor(self.reads, lambda: function(*args, **kwargs))

    async def make_room(self) -> None:
        """Give back what the disk could do without."""
        with suppress(StoreError):  # it is full or cannot be written, which whoever wanted room says
            await self.in_io(self.spool.make_room)
