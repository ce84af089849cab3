"""The parts of a coordinator: built from its settings, connected, opened and closed. Nothing else knows them all."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import structlog
import torch
from prometheus_client import CollectorRegistry

from fl_common.files import restrict_permissions
from fl_common.tracing.opening import open_traces
from fl_server.aggregation.outside_task.child import ForkServer
from fl_server.aggregation.outside_task.remote_task import TaskProcesses
from fl_server.audit.log import AuditLog
from fl_server.clients.fleet import Denials, Fleet
from fl_server.enrollment.authority import Authority
from fl_server.enrollment.calls import CertificatesService, EnrollmentService
from fl_server.enrollment.grants import Revocations
from fl_server.enrollment.issuing import Checks, Issuer
from fl_server.leadership import Leading, Opened, ledger_url, open_state
from fl_server.metrics import Metrics
from fl_server.oidc import SigningKeys, TokenVerifier
from fl_server.outside_calls import OutsideCalls
from fl_server.privacy_accounts import SecondAccountant
from fl_server.rpc import admin, service, workers
from fl_server.rpc.health import Health
from fl_server.rpc.listening import Callers, Certificates, ConnectionWatch, Listeners
from fl_server.rpc.ports import Connections, ports
from fl_server.runs.coordinator import Coordinator
from fl_server.services import EvaluationSlots, Services
from fl_server.settings.config import ServerConfig
from fl_server.store.checkpoints import Checkpoints
from fl_server.store.errors import disk_errors
from fl_server.store.ledger import Ledger
from fl_server.store.objects.bucket import Bucket, check_access
from fl_server.store.objects.files import StoredFiles
from fl_server.store.objects.local_cache import LocalCache
from fl_server.store.spool.spool import Spool, UnfinishedLimit
from fl_server.store.uploaded_models import UploadedModels
from fl_server.uploads.receiver import UploadReceiver
from fl_server.web.page import WebPage, WebSessions
from protos.fl.v1 import admin_pb2_grpc, enrollment_pb2_grpc, worker_pb2_grpc
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

EVALUATIONS = 2
"""Evaluations on the server at a time."""


@dataclass(frozen=True, slots=True)
class Begun:
    """What a process has before its coordinator is built."""

    metrics: Metrics
    metrics_address: str = ""
    """The address of the page of metrics; "": there is none."""
    opened: Opened | None = None
    """The state of a standby that leads now; None: it is still to be opened."""
    forks: ForkServer | None = None
    """Starts processes of tasks from outside."""


class Server:
    """One coordinator process. Built in any thread, because that takes a while; then it lives on the event loop."""

    def __init__(
        self, config: ServerConfig, probes: Health, connections: Connections, begun: Begun | None = None
    ) -> None:
        """connections: the connections that each port may have. begun: what the process has before; None: nothing."""
        begun = begun or Begun(Metrics(CollectorRegistry()))
        forks = begun.forks
        self._processes = None if forks is None else TaskProcesses(forks, config.limits)
        self.config = config
        self._health = probes
        self._connections, self._ports = connections, ports(config, connections)
        self._open = AsyncExitStack()
        metrics, self._metrics_address = begun.metrics, begun.metrics_address
        self._certificates = None if config.tls is None else Certificates(config.tls, metrics)
        self._services = self._build(metrics, begun.opened or open_state(config))
        if forks is not None:
            # Closed before the thread pools, whose threads may wait for the process of a task.
            self._open.callback(forks.close)
        self._coordinator = Coordinator(self._services)
        self._uploads = UploadReceiver(self._services)
        self._listeners = Listeners(self._services, self._ports, self._certificates)
        self._listeners.addresses |= probes.addresses
        files = None if self._certificates is None else self._certificates.files
        self._web = WebPage(config, self._services.web, files)

    def _build(self, metrics: Metrics, opened: Opened) -> Services:
        """Open files and thread pools."""
        config, state = self.config, self.config.state_dir
        traces = open_traces("fl-server")
        self._open.push_async_callback(asyncio.to_thread, traces.close)
        ledger = self._ledger(opened)
        leading = self._leading(ledger, metrics)
        torch.set_num_threads(config.threads)
        outside = self._outside(state / "outside-calls")
        files = self._stored_files(ledger, metrics)
        audit = AuditLog(ledger, state, config.limits.refusals_per_minute, metrics.audit_rows)
        self._open.push_async_callback(audit.close)
        most_held = UnfinishedLimit(config.transfers.kept_files, config.transfers.kept_mib << 20)
        fleet, revocations, reads = Fleet(ledger, config, metrics), Revocations(ledger), self._pool("reads", 2)
        return Services(
            config=config,
            ledger=ledger,
            checkpoints=Checkpoints(state / "checkpoints", files=files),
            uploaded=UploadedModels(state / "uploaded"),
            spool=Spool(state / "spool", config.durability, most_held, files),
            files=files,
            fleet=fleet,
            metrics=metrics,
            compute=self._pool("compute", 2),
            evaluations=self._pool("evaluation", EVALUATIONS),
            building=self._pool("building", 8),
            slots=EvaluationSlots(EVALUATIONS),
            processes=self._processes,
            outside=outside,
            io=self._pool("io", 4),
            reads=reads,
            revocations=revocations,
            issuer=self._issuer(ledger, Checks(revocations, fleet.records.refuse_holder, fleet.records.find), reads),
            pem_files=None if self._certificates is None else self._certificates.files,
            audit=audit,
            leading=leading,
            traces=traces,
            web=WebSessions(revocations),
            second=SecondAccountant(self._pool("privacy", 1)),
        )

    def _ledger(self, opened: Opened) -> Ledger:
        """The ledger and the lock of the state directory, which others may not read."""
        self._open.callback(opened.lock.release)
        ledger = Ledger(opened.store)
        self._open.callback(ledger.close)
        if still := restrict_permissions(self.config.state_dir):
            log.warning("state_is_open_to_others", files=len(still), first=str(still[0]), todo="chmod -R go= state_dir")
        return ledger

    def _outside(self, file: Path) -> OutsideCalls:
        """The watch of code from outside, started."""
        outside = OutsideCalls(file)
        with disk_errors("watch code from outside"):
            outside.start()
        self._open.callback(outside.close)
        return outside

    def _leading(self, ledger: Ledger, metrics: Metrics) -> Leading | None:
        """The lease; None with SQLite."""
        if (url := ledger_url(self.config)) is None:
            metrics.leading.set(1)
            return None
        leading = Leading(url, ledger, self.config.lease_s, metrics)
        self._open.push_async_callback(leading.close)
        return leading

    def _stored_files(self, ledger: Ledger, metrics: Metrics) -> StoredFiles | None:
        """The files in the object store; None without one. Raises StoreError if it cannot be used."""
        config = self.config
        if config.storage is None:
            return None
        bucket = Bucket(config.storage, config.objects, metrics.object_seconds)
        check_access(bucket)
        files = StoredFiles(
            bucket,
            ledger,
            config.state_dir,
            LocalCache(config.objects.cache_mib << 20),
            shared=config.workers is not None,
        )
        self._open.callback(files.close)
        return files

    def _pool(self, name: str, threads: int) -> ThreadPoolExecutor:
        """A thread pool that is shut down when the coordinator closes."""
        pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        # In a thread: the loop has to answer health checks.
        self._open.push_async_callback(asyncio.to_thread, pool.shutdown, wait=True, cancel_futures=True)
        return pool

    def _issuer(self, ledger: Ledger, checks: Checks, reads: ThreadPoolExecutor) -> Issuer | None:
        """The issuer of devices' certificates; None without enrollment."""
        tls, config = self._certificates, self.config.enrollment
        if config is None or tls is None:
            return None
        return Issuer(ledger, config, Authority(config, tls.files), checks, reads)

    @property
    def ledger(self) -> Ledger:
        """The ledger."""
        return self._services.ledger

    @property
    def metrics(self) -> Metrics:
        """The metrics."""
        return self._services.metrics

    async def start(self) -> None:
        """Restore the state, then listen. Raises SettingsError for a port or a certificate that cannot be used."""
        if self._services.leading is not None:
            self._services.leading.start()
        clients = self._listeners.open(self.config.listen, "listen")
        clients.add_generic_rpc_handlers(
            (service.handlers(service.CoordinatorService(self._services, self._coordinator, self._uploads)),)
        )
        certificates = CertificatesService(self._services.issuer, self._services.metrics, self._services.audit)
        enrollment_pb2_grpc.add_CertificatesServicer_to_server(certificates, clients)
        for_workers = self._workers()
        operators = await self._operators()
        self._services.metrics.watch(asyncio.get_running_loop(), self.config.state_dir)
        self._health.count(self._services.metrics)
        if self._metrics_address:
            self._listeners.addresses["metrics_listen"] = self._metrics_address
        await self._services.revocations.load()
        await self._services.audit.start()
        await self._services.fleet.start()
        services = self._services
        denials = Denials(self.config, services.ledger, services.revocations, services.fleet)
        await denials.restore(services.audit)
        await self._coordinator.start()
        served = [(clients, service.SERVICE), *((server, admin.SERVICE) for server in operators), *for_workers]
        for server, name in served:
            await self._listeners.start(server, name, self._health)
        await self._start_enrollment()
        await self._start_web()
        await self._health.ready()
        log.info("serving", state_dir=str(self.config.state_dir), pid=os.getpid(), **self._listeners.addresses)

    def _workers(self) -> list[tuple[grpc.aio.Server, str]]:
        """The server for workers, with its service; none without the setting."""
        if (config := self.config.workers) is None:
            return []
        server = self._listeners.open(config.listen, "workers.listen")
        made = workers.WorkersService(self._services, self._coordinator, self._uploads)
        worker_pb2_grpc.add_WorkersServicer_to_server(made, server)
        return [(server, workers.SERVICE)]

    async def _start_enrollment(self) -> None:
        """Listen for devices without a certificate."""
        issuer = self._services.issuer
        if self.config.enroll_listen is None or issuer is None:
            return
        server = self._listeners.open(self.config.enroll_listen, "enroll_listen", Callers(issuer.authority.presented))
        service = EnrollmentService(issuer, self._services.metrics, self._services.audit)
        enrollment_pb2_grpc.add_EnrollmentServicer_to_server(service, server)
        await server.start()

    async def _start_web(self) -> None:
        """Serve the web page."""
        services, address = self._services, self.config.web_listen
        if address is None:
            return
        server = self._listeners.for_web(services.web)
        admin_pb2_grpc.add_AdminServicer_to_server(admin.AdminService(services, self._coordinator), server)
        shown = await self._web.start(server, address, services.audit, services.metrics)
        self._listeners.addresses["web_listen"] = shown

    async def _operators(self) -> list[grpc.aio.Server]:
        """The servers for operators: with certificates, and with tokens if the settings have a port for them."""
        config, opened = self.config, [self._listeners.open(self.config.admin_listen, "admin_listen")]
        if config.token_listen is not None and config.oidc is not None:
            tokens = TokenVerifier(config.oidc, SigningKeys(config.oidc))
            await tokens.start()
            opened.append(self._listeners.open(config.token_listen, "token_listen", Callers(tokens=tokens)))
        for server in opened:
            admin_pb2_grpc.add_AdminServicer_to_server(admin.AdminService(self._services, self._coordinator), server)
        return opened

    async def drain(self) -> None:
        """Start nothing new. Work under way may finish within the grace; the rest is on disk for the next start.

        With a standby there is no grace: it continues all work at once.
        """
        leading = self._services.leading
        grace_s = 0.0 if leading is not None and leading.has_standby else self.config.drain_grace_s
        log.info("draining", grace_s=grace_s)
        self._services.metrics.draining.set(1)
        self._coordinator.drain()
        self._services.fleet.sessions.push_all(
            pb.AttendResponse(drain=pb.Drain(coordinator_leaving=True, reason="shutting down"))
        )
        ends = time.monotonic() + grace_s
        while time.monotonic() < ends and self._busy():  # noqa: ASYNC110 - two kinds of work, polled for some seconds
            await asyncio.sleep(0.05)

    def _busy(self) -> bool:
        return self._uploads.in_flight > 0 or any(run.state.computing for run in self._coordinator.runs())

    async def stop(self) -> None:
        """Close everything, in the reverse order of opening."""
        await self._web.stop()
        await self._listeners.stop(0.2)
        await self._coordinator.close()
        await self._open.aclose()

    async def watch_certificates(self) -> None:
        """Use renewed certificates."""
        if self._certificates is not None:
            async for _ in self._certificates.checks():
                await asyncio.to_thread(self._poll_others)
                self._web.renew()

    def _poll_others(self) -> None:
        self._web.poll()
        if (issuer := self._services.issuer) is not None:
            issuer.authority.poll()
            self._services.metrics.certificates.show({"authority": issuer.authority.period})

    async def remove_objects(self) -> None:
        """Remove objects that no file consists of any more."""
        if (files := self._services.files) is not None:
            await files.keep_removing()

    async def watch_connections(self) -> None:
        """Watch the connections, and log when a port has no more of them."""
        limits = {setting: port.connections for setting, port in self._ports.items()}
        limits["metrics_listen"] = self._connections.metrics
        await ConnectionWatch(self._listeners.addresses, limits, self._services.metrics).watch()
