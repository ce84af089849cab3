"""The real coordinator as a simulated process: all parts of `server.Server` but its ports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import grpc
from prometheus_client import CollectorRegistry

from fl_server.audit.log import AuditLog
from fl_server.clients.fleet import Fleet, OperatorActions
from fl_server.enrollment.grants import Revocations
from fl_server.metrics import Metrics
from fl_server.outside_calls import OutsideCalls
from fl_server.rpc import service
from fl_server.rpc.call_limits import CallLimits
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy
from fl_server.runs.coordinator import Coordinator
from fl_server.services import EvaluationSlots, Services
from fl_server.settings.config import ServerConfig
from fl_server.store.checkpoints import Checkpoints
from fl_server.store.database.store import Store
from fl_server.store.ledger import Ledger
from fl_server.store.records import CommitRecord, HistoryRecord
from fl_server.store.spool.spool import Spool, UnfinishedLimit
from fl_server.store.state_directory import lock_directory
from fl_server.store.uploaded_models import UploadedModels
from fl_server.uploads import stream
from fl_server.uploads.receiver import UploadReceiver
from fl_server.web.page import WebSessions
from tests.deterministic.certificates import tls_of
from tests.deterministic.effects import Effects, ledger_engine
from tests.deterministic.loop import AtOnce, Process, Threads
from tests.deterministic.network import Handlers
from tests.deterministic.objects import URL, stored_files
from tests.deterministic.serving import Details

P = ParamSpec("P")
R = TypeVar("R")
TASK = "tests.processes.tiny_task:Tiny"


def settings(folder: Path) -> ServerConfig:
    """The coordinator's settings."""
    return ServerConfig.model_validate(
        {
            "state_dir": folder, "tls": tls_of("server", "coordinator"), "tasks": [TASK],
            "limits": {"chunk_bytes": 1 << 16, "lost_after_s": 60.0},
        }
    )  # fmt: skip


Committed = Callable[[int, str], None]
"""Called with round and model digest of each commit."""


class WatchedStore(Store):
    """The ledger, which tells of each commit, also of one whose process dies with it."""

    committed: Committed = staticmethod(lambda round_, digest: None)

    def commit(self, commit: CommitRecord, why: HistoryRecord, left_out: Sequence[str] = ()) -> None:
        super().commit(commit, why, left_out)
        self.committed(commit.round, commit.model_digest)

    def commits(self, run_id: str, first: int = 0, limit: int | None = None) -> list[CommitRecord]:
        found = super().commits(run_id, first, limit)
        for commit in found:
            self.committed(commit.round, commit.model_digest)
        return found


class DirectLedger(Ledger):
    """The ledger. Its thread is no other one, so a call that waits for it is done at once."""

    def call(self, method: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return method(*args, **kwargs)


class CoordinatorProcess:
    """One start of the coordinator. Made in the context of its process."""

    def __init__(self, config: ServerConfig, process: Process, effects: Effects, committed: Committed) -> None:
        folder = config.state_dir
        process.on_kill.append(stream._WAITS.clear)  # the next process has none, but the same event loop
        metrics = Metrics(CollectorRegistry())
        lock = lock_directory(folder)
        process.on_kill.append(lock.release)
        engine = ledger_engine(folder / "ledger.sqlite", effects, process)
        objects = effects.objects
        home = lock.home if objects is None else replace(lock.home, storage=URL)
        store = WatchedStore(engine, config.durability, home)
        store.committed = committed
        lock.keep_ledger(store.coordinator_id)
        log = DirectLedger(store, _pool("ledger", 1))
        self._process, files = process, None if objects is None else stored_files(objects, effects, log, config)
        held = UnfinishedLimit(config.transfers.kept_files, config.transfers.kept_mib << 20)
        revocations = Revocations(log)
        self.services = Services(
            config=config,
            ledger=log,
            checkpoints=Checkpoints(folder / "checkpoints", AtOnce, files),
            uploaded=UploadedModels(folder / "uploaded"),
            spool=Spool(folder / "spool", config.durability, held, files),
            files=files,
            fleet=Fleet(log, config, metrics),
            metrics=metrics,
            compute=_pool("compute", 2),
            evaluations=_pool("evaluation", 2),
            building=_pool("building", 8),
            slots=EvaluationSlots(2),
            outside=OutsideCalls(folder / "outside-calls"),
            io=_pool("io", 4),
            reads=_pool("reads", 2),
            audit=AuditLog(log, folder, 10, metrics.audit_rows),
            revocations=revocations,
            web=WebSessions(revocations),
        )
        self.coordinator = Coordinator(self.services)
        self.uploads = UploadReceiver(self.services)
        self.operators = OperatorActions(log, self.services.fleet)
        self.store = store

    async def start(self) -> Handlers:
        """Restore the state; returns the handlers of its calls."""
        await self.services.revocations.load()
        await self.services.audit.start()
        await self.services.fleet.start()
        await self.coordinator.start()
        if (files := self.services.files) is not None:
            self._process.spawn(files.keep_removing())
        made = service.CoordinatorService(self.services, self.coordinator, self.uploads)
        generic = service.handlers(made)
        limits, fleet = self.services.config.limits, self.services.fleet
        policy = CallPolicy(
            self.services.metrics, CallLimits(64, 1000), "listen", fleet.records,
            self.services.revocations, limits.stall_s, self.services.audit, trusts_everybody=True,
        )  # fmt: skip
        interceptor = CallInterceptor(policy)

        async def found(details: Any) -> grpc.RpcMethodHandler[Any, Any] | None:
            return generic.service(details)

        handlers = {}
        for name in ("Register", "Attend", "FetchModel", "SubmitUpdate", "QueryUpload", "ReportStatus",
                     "ReportEvaluation", "AnswerStage"):  # fmt: skip
            method = f"/{service.SERVICE}/{name}"
            handlers[method] = await interceptor.intercept_service(found, Details(method))  # type: ignore[arg-type]
        return handlers

    async def stop(self) -> None:
        """SIGTERM: drain and close."""
        self.coordinator.drain()
        await asyncio.sleep(0.05)
        await self.coordinator.close()
        self.services.ledger.close()


def _pool(name: str, threads: int) -> Any:
    return Threads(threads, name)
