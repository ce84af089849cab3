"""A whole coordinator in this process, without a network.

Ledger, spool and checkpoints are the real ones. A `Journal` counts the writes and can end the "process" after any of
them: every later read or write raises Killed, and a new `World` on the same folder is the restart.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TypeVar, cast

from prometheus_client import CollectorRegistry

from fl_server.audit.log import AuditLog
from fl_server.clients.fleet import Fleet, OperatorActions
from fl_server.enrollment.grants import Revocations
from fl_server.metrics import Metrics
from fl_server.outside_calls import OutsideCalls
from fl_server.rpc.service import CoordinatorService
from fl_server.run.run import Run
from fl_server.run_settings.config import RunConfig
from fl_server.run_settings.spec import from_values
from fl_server.runs.coordinator import Coordinator
from fl_server.services import EvaluationSlots, Services
from fl_server.settings.config import QuarantineConfig, ServerConfig, StatesConfig
from fl_server.settings.sections import LimitsConfig, TransfersConfig
from fl_server.store.checkpoints import Checkpoints
from fl_server.store.database.store import open_sqlite
from fl_server.store.errors import Durability
from fl_server.store.ledger import Ledger
from fl_server.store.spool.part_file import PartFile
from fl_server.store.spool.spool import Spool, UnfinishedLimit
from fl_server.store.uploaded_models import UploadedModels
from fl_server.uploads.receiver import UploadReceiver
from fl_server.web.page import WebSessions

T = TypeVar("T")

TASK = "tests.processes.tiny_task:Tiny"
TIMEOUT_S = 60.0
"""A test fails after this long without the expected event. It makes no claim about speed."""
CHUNK = 1 << 16


def run_config(name: str = "r", **sections: Any) -> RunConfig:
    """Two rounds of FedCM with two clients each, on a model with BatchNorm; arguments replace whole sections."""
    values: dict[str, Any] = {
        "name": name,
        "task": {"name": TASK, "options": {"model": "batchnorm"}},
        "algorithm": {"name": "fedcm", "parameters": {"alpha": 0.3}},
        "local": {"steps": 2},
        "round": {"clients_per_round": 2},
        "stop": {"rounds": 2},
        "seed": 7,
    }
    return from_values({**values, **sections})


async def until(probe: Callable[[], T | None], what: str) -> T:
    """Wait for the first true value of `probe` and return it. The event loop keeps running."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not (value := probe()):
                await asyncio.sleep(0.005)
            return value
    except TimeoutError:
        raise AssertionError(f"did not happen within {TIMEOUT_S:g} s: {what}") from None


class Killed(BaseException):
    """The process ended here. A BaseException, so that no handler continues after it."""


class Journal:
    """All writes, in order. The process dies after write number `dies_at`, or after the first write of that name."""

    def __init__(self, dies_at: int | str | None = None) -> None:
        self.writes: list[str] = []
        self.dead = False
        self.dies_at = dies_at
        self._lock = threading.Lock()

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forward a call, and record it if it is a write."""
        if self.dead:
            raise Killed
        result = function(*args, **kwargs)
        if name in WRITES:
            with self._lock:
                self.writes.append(name)
                self.dead = self.dead or self.dies_at in (len(self.writes), name)
            if self.dead:
                raise Killed
        return result


WRITES = {
    "create_run", "update_run", "open_attempt", "record_update", "record_updates", "drop_update", "fix_accepted",
    "refuse_accepted", "restart_round", "commit", "set_metrics", "set_seconds_left", "set_usage",
    "set_clients_seconds_left", "record_evaluation", "put_clients", "add_history", "clear_quarantine_record",
    "put_quarantine_record", "put_client_state_records", "seal", "save", "add_release", "save_release",
}  # fmt: skip
"""Methods of ledger, spool and checkpoints that write to the disk."""


class CrashProxy:
    """Wraps a store, a spool or checkpoints; all calls pass through the journal."""

    def __init__(self, inner: Any, journal: Journal) -> None:
        self._inner, self._journal = inner, journal

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name == "close" or not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            result = self._journal.call(name, attribute, *args, **kwargs)
            if isinstance(result, PartFile):
                seal = result.seal
                result.seal = lambda: self._journal.call("seal", seal)  # type: ignore[method-assign]  # this file alone
            return result

        return call


def _ignore_killed_tasks(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Tasks of a killed process end without a message."""
    if not isinstance(context.get("exception"), Killed):
        loop.default_exception_handler(context)


def ledger_file(folder: Path) -> Path:
    """The ledger of a state directory. A new one is a copy of an empty one: a fifth of the cost of its tables."""
    if not (path := folder / "ledger.sqlite").exists():
        path.write_bytes(_empty_ledger())
    return path


@cache
def _empty_ledger() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        open_sqlite(path).close()
        return path.read_bytes()


def _most_held(config: ServerConfig) -> UnfinishedLimit:
    return UnfinishedLimit(config.transfers.kept_files, config.transfers.kept_mib << 20)


def _services(config: ServerConfig, journal: Journal) -> Services:
    """The parts of a coordinator; the journal counts what they write."""
    folder = config.state_dir
    metrics = Metrics(CollectorRegistry())
    store = open_sqlite(ledger_file(folder), config.durability)
    ledger = Ledger(CrashProxy(store, journal))  # type: ignore[arg-type]  # a proxy
    revocations = Revocations(ledger)
    return Services(
        config=config,
        ledger=ledger,
        checkpoints=CrashProxy(Checkpoints(folder / "checkpoints"), journal),  # type: ignore[arg-type]  # a proxy
        uploaded=UploadedModels(folder / "uploaded"),
        spool=CrashProxy(Spool(folder / "spool", config.durability, _most_held(config)), journal),  # type: ignore[arg-type]  # a proxy
        fleet=Fleet(ledger, config, metrics),
        metrics=metrics,
        compute=ThreadPoolExecutor(1),
        evaluations=ThreadPoolExecutor(1),
        building=ThreadPoolExecutor(1),
        slots=EvaluationSlots(1),
        outside=OutsideCalls(folder),
        io=ThreadPoolExecutor(2),
        reads=ThreadPoolExecutor(1),
        audit=AuditLog(ledger, folder, 10, metrics.audit_rows),
        revocations=revocations,
        web=WebSessions(revocations),
    )


class World:
    """One coordinator on a folder, from start to shutdown."""

    def __init__(
        self,
        folder: Path,
        journal: Journal | None = None,
        *,
        quarantine: Mapping[str, float] | None = None,
        transfers: Mapping[str, float] | None = None,
        states: Mapping[str, int] | None = None,
        durability: Durability = "process",
        tasks: Sequence[str] = (TASK,),
        settings: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.journal = journal or Journal()
        self.config = ServerConfig(
            state_dir=folder,
            insecure=True,
            tasks=list(tasks),
            limits=LimitsConfig.model_validate({"chunk_bytes": CHUNK, **limits}),
            quarantine=QuarantineConfig.model_validate(quarantine or {}),
            transfers=TransfersConfig.model_validate(transfers or {}),
            states=StatesConfig.model_validate(states or {}),
            durability=durability,
            **(settings or {}),
        )
        self.services = _services(self.config, self.journal)
        self.operators = OperatorActions(self.services.ledger, self.services.fleet)
        self.coordinator = Coordinator(self.services)
        self.uploads = UploadReceiver(self.services)
        self.service = CoordinatorService(self.services, self.coordinator, self.uploads)
        self.tasks: set[asyncio.Task[Any]] = set()

    @property
    def fleet(self) -> Fleet:
        """The coordinator's fleet."""
        return self.services.fleet

    @property
    def spool(self) -> Spool:
        """The spool without the journal."""
        inner: Spool = cast(Any, self.services.spool)._inner
        return inner

    @property
    def store(self) -> Any:
        """The ledger's store without the journal, so that it can be read after a kill."""
        return cast(Any, self.services.ledger.store)._inner

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().set_exception_handler(_ignore_killed_tasks)
        await self.services.fleet.start()
        await self.coordinator.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        with suppress(Killed):
            await self.coordinator.close()
        services = self.services
        for pool in (services.compute, services.evaluations, services.io, services.reads):
            pool.shutdown(wait=True, cancel_futures=True)
        self.services.ledger.close()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine in the background until the world closes."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        return task

    async def create(self, **sections: Any) -> Run:
        """Create a run."""
        return await self.coordinator.creation.create(run_config(**sections), "admin")

    async def ended(self, run_id: str = "r") -> Run:
        """Wait until the run has ended; returns it."""
        run = self.coordinator.run(run_id)
        await until(lambda: run.ended and run.record.ended_at, f"{run_id} ends; it is in {run.state}")
        return run

    async def completed(self, run_id: str = "r") -> list[str]:
        """Wait until the run is completed; the digest of the model after each round."""
        run = await self.ended(run_id)
        assert run.status == "completed", run.state.ending
        return [commit.model_digest for commit in self.store.commits(run.id)]

    def metric(self, name: str, /, **labels: str) -> float:
        """A metric's value; 0 if it was never set."""
        return self.services.metrics.registry.get_sample_value(name, labels) or 0.0
