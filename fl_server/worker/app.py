"""The life of a worker's process: attach to the coordinator, serve clients, drain, stop."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial

import structlog
import torch
from prometheus_client import CollectorRegistry

from fl_common.certificates.pem import Pem, PemChange, PemFiles, PemWatcher
from fl_common.logs import RepeatFilter, write_repeat_counts
from fl_common.metrics import serve_metrics
from fl_common.metrics_server import ServerLimits
from fl_common.names import ID_PATTERN
from fl_common.settings import SettingsError, split_address
from fl_server.app import STOP_S, end_in_time, listen_to_signals
from fl_server.clients.transfer_limits import TransferLimits
from fl_server.metrics import WORKER_BUILD_INFO, Metrics
from fl_server.rpc.call_limits import CallLimits
from fl_server.rpc.health import Health
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy
from fl_server.rpc.listening import Certificates
from fl_server.rpc.ports import (
    Connections,
    LastingServer,
    allow_open_files,
    ports,
    server_of,
    warn_of_few_files,
    worker_port,
)
from fl_server.rpc.service import SERVICE
from fl_server.settings.config import ServerConfig
from fl_server.settings.sections import WorkersConfig
from fl_server.store.errors import StoreError
from fl_server.store.objects.bucket import Bucket, NoObject, check_access
from fl_server.store.objects.local_cache import LocalCache
from fl_server.store.spool.spool import Spool, UnfinishedLimit
from fl_server.store.state_directory import ledger_of
from fl_server.uploads.part_receiver import Disk
from fl_server.worker.link import Link
from fl_server.worker.service import Copies, DataService, handlers
from fl_server.worker.upload import WorkerFiles
from protos.fl.v1.worker_pb2 import ServeResponse

log = structlog.get_logger()

NO_LIMIT = UnfinishedLimit(1 << 30, 1 << 62)
"""The coordinator has the limit of all unfinished uploads of a client."""
AWAY_S = 15.0
"""A coordinator is away for longer than any takeover needs, or the object store: other workers may reach it, so clients
are sent to them."""
LOOK_S, STORE_LOOK_S = 1.0, 5.0
"""Periods of the looks at the coordinator and at the object store."""
COPIES = "worker-copies"
"""Folder of the copies of what clients fetch, in the state directory."""


async def serve(config: ServerConfig, repeats: RepeatFilter | None = None) -> None:
    """Run a worker until SIGTERM or SIGINT. Raises SettingsError."""
    if (workers := config.workers) is None:
        raise SettingsError("--role data: expected a section [workers] in the settings, found none")
    leaving, probes = asyncio.Event(), Health((SERVICE,))
    listen_to_signals(leaving)
    connections = allow_open_files(config.limits.max_clients, config.connections)
    await probes.listen(config.health_listen, ports(config, connections)["health_listen"])
    warn_of_few_files(config.limits, connections)
    ending = asyncio.create_task(end_in_time(leaving, config.drain_grace_s + STOP_S, probes))
    try:
        async with AsyncExitStack() as opened:
            worker = await asyncio.to_thread(Worker, config, workers, opened)
            counting = asyncio.create_task(write_repeat_counts(repeats or RepeatFilter(0)))
            opened.callback(counting.cancel)
            await _serve(worker, connections, probes, leaving)
    finally:
        ending.cancel()
        await probes.close()
    log.info("stopped")


async def _serve(worker: Worker, connections: Connections, probes: Health, leaving: asyncio.Event) -> None:
    """Attach, serve, drain."""
    works = [worker.keep_attached(probes), worker.metrics.measure_lag(), worker.send_clients_on(probes)]
    if worker.certificates is not None:
        works.append(worker.renew(worker.certificates))
    attaching, *others = [asyncio.create_task(work) for work in works]
    ended, first = asyncio.create_task(leaving.wait()), asyncio.create_task(worker.is_attached.wait())
    try:
        for awaited in (first, None):
            if awaited is None:
                await worker.listen(connections, probes)
            await asyncio.wait({attaching, ended, *([awaited] if awaited else [])}, return_when=asyncio.FIRST_COMPLETED)
            if attaching.done():
                attaching.result()  # raises: the settings do not suit the coordinator
            if ended.done():
                break
        await worker.drain()
    finally:
        for task in (attaching, *others, ended, first):
            task.cancel()


class Worker:
    """One worker. Built in any thread; then it lives on the event loop."""

    def __init__(self, config: ServerConfig, workers: WorkersConfig, opened: AsyncExitStack) -> None:
        self._config, self._workers, self._opened = config, workers, opened
        torch.set_num_threads(config.threads)
        self.metrics = Metrics(CollectorRegistry(), WORKER_BUILD_INFO)
        self.certificates = None if config.tls is None else Certificates(config.tls, self.metrics)
        self._for_coordinator: PemWatcher | None = None
        """The certificate for the coordinator; None: the one for devices."""
        if (own := config.worker_tls) is not None:
            self._for_coordinator = PemWatcher(PemFiles(own.cert, own.key, own.ca, section="worker_tls"))
            self._show_expiry(self._for_coordinator.pem)
        self.is_attached = asyncio.Event()
        """Set when the coordinator has been there once. Nothing is written before."""
        name = "".join(letter if ID_PATTERN.fullmatch(letter) else "-" for letter in socket.gethostname())
        self._link = Link(
            [workers.coordinator or workers.listen, *workers.standbys], f"{name[:48]}-{os.getpid()}", "impetus"
        )
        opened.push_async_callback(self._link.close)
        self._service: DataService
        self._make_server: Callable[[], LastingServer] | None = None
        """None until the port for clients was open."""
        self._server: LastingServer | None = None
        """That port; None while it is closed."""
        self._files: WorkerFiles | None = None
        self._watched: Bucket | None = None
        """The object store, for looks that end soon; None without one."""

    def _made_service(self) -> DataService:
        config, state = self._config, self._config.state_dir
        io = ThreadPoolExecutor(4, thread_name_prefix="io")
        self._opened.push_async_callback(asyncio.to_thread, io.shutdown, wait=True, cancel_futures=True)
        limits = TransferLimits(config.transfers, self.metrics, config.limits.max_clients)
        files, shared = self._stored_files(), ledger_of(state) != ""
        if not shared:  # of an earlier process; what counts is in the object store
            shutil.rmtree(state / "spool", ignore_errors=True)
        spool = Spool(state / "spool", config.durability, NO_LIMIT, files, shared=shared)
        disk = Disk(config, spool, self.metrics, io, limits)
        copies = Copies(self._link, state / COPIES, self._workers.cache_mib << 20)
        return DataService(self._link, disk, copies, files)

    def _stored_files(self) -> WorkerFiles | None:
        """The object store; None without one. Raises StoreError if it cannot be used."""
        config, terms = self._config, self._link.terms
        if config.storage is None or terms is None or not terms.objects:
            return None
        bucket = Bucket(config.storage, config.objects, self.metrics.object_seconds)
        check_access(bucket)
        soon = {"retry_s": 0.0, "request_s": min(STORE_LOOK_S, config.objects.request_s)}
        self._watched = Bucket(config.storage, config.objects.model_copy(update=soon))
        files = WorkerFiles(bucket, terms.objects, config.state_dir, LocalCache(config.objects.cache_mib << 20))
        files.epoch = terms.epoch
        self._opened.callback(files.close)
        self._files = files
        return files

    async def listen(self, connections: Connections, probes: Health) -> None:
        """Listen for clients. Raises SettingsError."""
        config, self._service = self._config, await asyncio.to_thread(self._made_service)
        port = worker_port(config, connections, self._workers.age_s)
        tls = config.tls
        policy = CallPolicy(
            self.metrics,
            CallLimits(port.streams, port.calls, known_connections=2 * port.connections),
            "workers.serve",
            stall_s=config.limits.stall_s,
            trusts_everybody=tls is None or tls.no_client_certificates,
        )
        credentials = None
        if self.certificates is not None:
            credentials = partial(self.certificates.credentials, self.metrics.handshakes.labels("workers.serve").inc)

        def made() -> LastingServer:
            server = server_of(port, [CallInterceptor(policy)], credentials)
            server.add_generic_rpc_handlers((handlers(self._service),))
            probes.serve_on(server)
            return server

        self._opened.push_async_callback(self._close_port)
        address = await self._open_port(made, probes)
        self._make_server = made
        metrics = self._serve_metrics(connections)
        log.info("serving", role="data", pid=os.getpid(), serve=address, metrics_listen=metrics, **probes.addresses)

    async def _open_port(self, make: Callable[[], LastingServer], probes: Health) -> str:
        """Listen for clients; returns the address. Raises SettingsError."""
        server = make()
        address = server.listen(self._workers.serve, "workers.serve")
        await server.start()
        self._server = server
        self._show(probes)
        return address

    def _show(self, probes: Health) -> None:
        """Report whether clients may come: the port is open, and a coordinator leads."""
        if self._server is not None and self._link.terms is not None:
            probes.resume()
        else:
            probes.pause()

    async def _close_port(self) -> None:
        if (server := self._server) is not None:
            self._server = None
            await server.stop(0.2)

    async def send_clients_on(self, probes: Health) -> None:
        """Close the port while this worker can reach no coordinator, or not its object store, for long; without end.

        Connections of clients would last for `age_s`, although another worker may reach both.
        """
        able = looked = time.monotonic()
        store = ""
        while True:
            await asyncio.sleep(LOOK_S)
            if self._watched is not None and time.monotonic() >= looked + STORE_LOOK_S:
                store, looked = await asyncio.to_thread(problem_of, self._watched), time.monotonic()
            why = store if self._link.terms is not None else "no coordinator can be reached"
            if not why:
                able = time.monotonic()
                if self._server is None and self._make_server is not None:
                    with suppress(SettingsError):  # somebody else has the port: at the next look
                        log.info("port_open", serve=await self._open_port(self._make_server, probes))
            elif self._server is not None and time.monotonic() > able + AWAY_S:
                await self._close_port()
                self._show(probes)
                log.warning("port_closed", reason=why, todo="clients go to other workers")

    def _serve_metrics(self, connections: Connections) -> str:
        """Serve metrics where the settings say so; returns the address.

        The usual one is the coordinator's, if that is on this machine.
        """
        self.metrics.watch(asyncio.get_running_loop(), self._config.state_dir)
        if self._config.metrics_listen is None:
            return ""
        address = split_address(self._config.metrics_listen)
        try:
            limits = ServerLimits(connections.metrics, self._config.connections.handshake_s)
            port = self._opened.enter_context(serve_metrics(self.metrics.registry, address, limits))
        except OSError as error:
            log.warning("no_metrics", metrics_listen=self._config.metrics_listen, reason=error.strerror)
            return ""
        return f"{address[0]}:{port}"

    async def keep_attached(self, probes: Health) -> None:
        """Attach to the coordinator, without end. Raises SettingsError for a state directory of another one."""
        state = self._config.state_dir

        def attached(terms: ServeResponse | None) -> None:
            if terms is None:
                self._show(probes)
                return
            if bool(terms.objects) != (self._config.storage is not None):
                raise SettingsError("storage: expected the coordinator's own setting, got another one")
            if ledger_of(state) != terms.coordinator_id and (not terms.objects or ledger_of(state)):
                raise SettingsError(
                    f"state_dir: expected the coordinator's own state directory, which workers share, got {state}: "
                    "mount it; or with `storage` name a new folder"
                )
            if self._files is not None:
                self._files.epoch = terms.epoch
            self.is_attached.set()
            self._show(probes)

        await self._link.keep_attached(self._shown_to_coordinator, attached)

    def _shown_to_coordinator(self) -> Pem | None:
        """The present files for the connection to the coordinator."""
        certificates = self.certificates
        if certificates is None:
            return None
        return certificates.files.pem if self._for_coordinator is None else self._for_coordinator.pem

    async def renew(self, certificates: Certificates) -> None:
        """Use new files soon after they are there, without end."""
        async for _ in certificates.checks():
            if (own := self._for_coordinator) is None:
                continue
            match await asyncio.to_thread(own.poll):
                case PemChange.RENEWED:
                    log.info("certificates_renewed", section="worker_tls", serial=f"{own.pem.leaf.serial_number:x}")
                    self._show_expiry(own.pem)
                case PemChange.UNUSABLE:
                    log.warning("certificates_not_used", reason=own.problem, todo="the earlier ones stay in use")

    def _show_expiry(self, pem: Pem) -> None:
        self.metrics.certificates.show({"worker": pem.periods()["cert"]})

    async def drain(self) -> None:
        """Let transfers under way finish within the grace; the rest goes on at another worker."""
        log.info("draining", grace_s=self._config.drain_grace_s)
        ends = time.monotonic() + self._config.drain_grace_s
        while time.monotonic() < ends and self.is_attached.is_set() and self._service.in_flight:  # noqa: ASYNC110 - polled for some seconds
            await asyncio.sleep(0.05)


def problem_of(bucket: Bucket) -> str:
    """Why an object store cannot be used now; empty if it can. Asks for an object that is not there. Blocking."""
    try:
        bucket.get("access-check/none")
    except NoObject:
        pass
    except StoreError as error:
        return str(error)
    return ""
