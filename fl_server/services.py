"""The services that all runs of a coordinator share, created once by `server.py`, and the places for evaluations.

There are as many places for evaluations on the server as threads for them, given in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import ParamSpec, TypeVar

from fl_common.certificates.pem import PemWatcher
from fl_common.tracing.traces import UNTRACED, Traces
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.outside_task.remote_task import TaskProcesses
from fl_server.audit.log import AuditLog
from fl_server.clients.fleet import Fleet
from fl_server.enrollment.grants import Revocations
from fl_server.enrollment.issuing import Issuer
from fl_server.leadership import Leading
from fl_server.metrics import Metrics
from fl_server.outside_calls import OutsideCalls, OutsideCode, guarded
from fl_server.privacy_accounts import SecondAccountant
from fl_server.settings.config import ServerConfig
from fl_server.store.checkpoints import Checkpoints
from fl_server.store.errors import StoreError
from fl_server.store.ledger import Ledger
from fl_server.store.objects.files import StoredFiles
from fl_server.store.spool.spool import Spool
from fl_server.store.state_directory import RunSecrets
from fl_server.store.uploaded_models import UploadedModels
from fl_server.web.page import WebSessions

P = ParamSpec("P")
R = TypeVar("R")


GIVES_WAY = "the run has ended, and another one waits for its place"
_AGAIN_S = 1.0
"""An evaluation that has not begun yet cannot be left, so it is asked again after this time."""


@dataclass(eq=False, slots=True)
class Place:
    """The place of one run's evaluation, or its wait for one."""

    run_id: str
    over: bool
    """Whether the run is over. Its evaluation then gives way to those of others."""
    engine: Engine | None = None
    """The engine of the evaluation under way."""


class EvaluationSlots:
    """The places for evaluations on the server, and who waits for one. Lives on the event loop."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._held: list[Place] = []
        self._waiting: list[Place] = []
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def place(self, run_id: str, *, over: bool) -> AsyncIterator[Place]:
        """A place for an evaluation, after those that asked before. Evaluations of runs that are over give way."""
        mine = Place(run_id, over)
        self._waiting.append(mine)
        try:
            await self._first_and_free(mine)
            self._held.append(mine)
        finally:
            self._waiting.remove(mine)
        try:
            yield mine
        finally:
            self._held.remove(mine)
            async with self._changed:
                self._changed.notify_all()

    async def _first_and_free(self, mine: Place) -> None:
        while self._waiting[0] is not mine or len(self._held) >= self._places:
            for place in self._held:
                if place.over and place.engine is not None:
                    place.engine.model.leave_evaluation(GIVES_WAY)
            async with self._changed:
                try:
                    async with asyncio.timeout(_AGAIN_S):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    def note_end(self, run_id: str, *, over: bool) -> None:
        """A run is over now, or goes on."""
        for place in (*self._held, *self._waiting):
            if place.run_id == run_id:
                place.over = over

    def waits_for(self, run_id: str) -> str:
        """Why the evaluation of a run has no place yet; empty if none of it waits."""
        if not any(place.run_id == run_id for place in self._waiting):
            return ""
        holders = ", ".join(sorted({place.run_id for place in self._held})) or "none"
        return f"its evaluation waits until one of {self._places} ends on the server; under way: {holders}"


@dataclass(frozen=True, slots=True)
class Services:
    """One coordinator's stores, clients, metrics and thread pools."""

    config: ServerConfig
    ledger: Ledger
    checkpoints: Checkpoints
    uploaded: UploadedModels
    spool: Spool
    fleet: Fleet
    metrics: Metrics
    compute: ThreadPoolExecutor
    """Pool for server steps and checkpoints: long work on a processor."""
    evaluations: ThreadPoolExecutor
    """Pool for evaluations on the server's data, apart from `compute`: a round never waits for long ones."""
    io: ThreadPoolExecutor
    """Pool for chunks and checks of uploads."""
    reads: ThreadPoolExecutor
    """Pool for reads that clients can ask for repeatedly; apart from `io`, so that uploads never wait for them."""
    building: ThreadPoolExecutor
    """Pool for the import of tasks and their model(), apart from `compute`: a round never waits for them."""
    slots: EvaluationSlots
    """The places in `evaluations`."""
    outside: OutsideCalls
    """Calls of methods and reducers from outside, apart from all pools, whose threads they might never return."""
    audit: AuditLog
    revocations: Revocations
    web: WebSessions
    """Sessions of browsers."""
    issuer: Issuer | None = None
    """Signs certificates of devices; None if the settings have no authority for that."""
    pem_files: PemWatcher | None = None
    """The coordinator's certificate and the authorities of its callers; None without TLS."""
    traces: Traces = UNTRACED
    addresses: dict[str, str] = field(default_factory=dict)
    """The open ports, host:port, by the setting's name."""
    files: StoredFiles | None = None
    """The object store that has checkpoints and updates; None: the state directory has them."""
    leading: Leading | None = None
    """The lease of a ledger in PostgreSQL; None: SQLite."""
    processes: TaskProcesses | None = None
    """Where tasks from outside run; None: in this process."""
    second: SecondAccountant = field(default_factory=SecondAccountant)
    """Epsilon of private runs by another accountant, for who reads it."""

    @property
    def secrets(self) -> RunSecrets:
        """The secrets of private runs."""
        return RunSecrets(self.config.state_dir / "privacy", self.files)

    async def in_compute(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a long computation outside the event loop."""
        work = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.compute, guarded, work)

    async def in_code(self, code: OutsideCode, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a computation that calls a run's method or reducer. Raises CallTimedOut for one from outside."""
        if not code.names:
            return await self.in_compute(function, *args, **kwargs)
        return await self.outside.call(code, self.config.limits.method_s, partial(function, *args, **kwargs))

    async def in_evaluations(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run an evaluation outside the event loop."""
        work = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.evaluations, guarded, work)

    async def in_building(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Load a task or make its model outside the event loop."""
        work = partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.building, guarded, work)

    async def in_io(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run work on an upload's file outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.io, lambda: function(*args, **kwargs))

    async def in_reads(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a read that a client asked for outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.reads, lambda: function(*args, **kwargs))

    async def free_disk_space(self) -> None:
        """Remove spare files from the disk."""
        with suppress(StoreError):  # the write that failed first is reported by its caller
            await self.in_io(self.spool.make_room)
