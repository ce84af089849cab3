"""The coordinator put together, from its settings to its last word: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress

import grpc.aio
import structlog
import torch
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from fl_server import admin, service
from fl_server.config import ServerConfig
from fl_server.coordinator import Coordinator
from fl_server.fleet import Fleet
from fl_server.health import Health, add_port
from fl_server.interceptors import CallInterceptor, CallPolicy
from fl_server.ledger import Ledger
from fl_server.logs import keep_telling
from fl_server.metrics import Metrics
from fl_server.open_files import Connections, allow_open_files
from fl_server.parts import Parts
from fl_server.rpc.callers import Callers
from fl_server.rpc.connections import ConnectionWatch
from fl_server.rpc.listeners import CALLS_BESIDE, ports
from fl_server.spool import Spool
from fl_server.store.checkpoints import Checkpoints
from fl_server.store.held_parts import MostHeld
from fl_server.store.lock import lock_directory
from fl_server.store.sql import open_ledger
from fl_server.tls import Certificates
from fl_server.uploads import Uploads
from protos.fl.v1 import admin_pb2_grpc
from protos.fl.v1 import coordinator_pb2 as pb
from protos.logs import Folder
from protos.metrics import listening
from protos.metrics_port import Serving
from protos.private_files import tighten
from protos.settings import SettingsError, split_address
from protos.traces import open_traces

log = structlog.get_logger()

_LAG_PERIOD_S = 0.1
STOP_S = 2.0
"""For closing everything, behind the grace: a step or a disk that hangs ends with the process."""
EXIT_AT_ONCE = 130


class Server:
    """One coordinator process. Made in any thread, for that takes a while; then it lives on the event loop."""

    def __init__(self, config: ServerConfig, probes: Health, connections: Connections) -> None:
        """connections: how many each port may have."""
        self.config = config
        self._health = probes
        self._connections, self._ports = connections, ports(config, connections)
        self._open = AsyncExitStack()
        self._parts = self._build()
        self._coordinator = Coordinator(self._parts)
        self._uploads = Uploads(self._parts)
        self._certificates: Certificates | None = None
        self._servers: list[grpc.aio.Server] = []
        self._addresses = dict(probes.addresses)

    def _build(self) -> Parts:
        """Everything that is on disk or counts; the state directory is ours from here on."""
        config, state = self.config, self.config.state_dir
        traces = open_traces("fl-server")
        self._open.push_async_callback(asyncio.to_thread, traces.close)
        lock = lock_directory(state)
        self._open.callback(lock.release)
        if still := tighten(state):
            log.warning("state_is_open_to_others", files=len(still), first=str(still[0]), todo="chmod -R go= state_dir")
        torch.set_num_threads(config.threads)
        metrics = Metrics(CollectorRegistry())
        url = None if config.ledger is None else config.ledger.get_secret_value()
        ledger = Ledger(open_ledger(url, state, config.durability, lock.home))
        self._open.callback(ledger.close)
        lock.keep_ledger(ledger.store.coordinator_id)
        most_held = MostHeld(config.transfers.kept_files, config.transfers.kept_mib << 20)
        compute = ThreadPoolExecutor(2, thread_name_prefix="compute")
        io = ThreadPoolExecutor(4, thread_name_prefix="io")
        reads = ThreadPoolExecutor(2, thread_name_prefix="reads")
        for pool in (compute, io, reads):
            # Beside the loop, which has probes to answer meanwhile.
            self._open.push_async_callback(asyncio.to_thread, pool.shutdown, wait=True, cancel_futures=True)
        return Parts(
            config=config,
            ledger=ledger,
            checkpoints=Checkpoints(state / "checkpoints"),
            spool=Spool(state / "spool", config.durability, most_held),
            fleet=Fleet(ledger, config, metrics),
            metrics=metrics,
            compute=compute,
            io=io,
            reads=reads,
            traces=traces,
        )

    @property
    def ledger(self) -> Ledger:
        """What is true."""
        return self._parts.ledger

    async def start(self) -> None:
        """Read the state back, then listen. Raises SettingsError for a port or a certificate that cannot be had."""
        if self.config.tls is not None:
            self._certificates = Certificates(self.config.tls, self._parts.metrics)
        clients = self._listener(self.config.listen, "listen")
        clients.add_generic_rpc_handlers(
            (service.handlers(service.CoordinatorService(self._parts, self._coordinator, self._uploads)),)
        )
        operators = self._listener(self.config.admin_listen, "admin_listen")
        admin_pb2_grpc.add_AdminServicer_to_server(admin.AdminService(self._parts, self._coordinator), operators)
        self._parts.metrics.watch(asyncio.get_running_loop(), self.config.state_dir)
        self._health.count(self._parts.metrics)
        self._serve_metrics()
        await self._parts.fleet.start()
        await self._coordinator.start()
        for server, name in ((clients, service.SERVICE), (operators, admin.SERVICE)):
            self._health.serve_on(server)
            if self.config.reflection:
                reflection.enable_server_reflection((name, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
            await server.start()
        await self._health.ready()
        log.info("serving", state_dir=str(self.config.state_dir), pid=os.getpid(), **self._addresses)

    def _listener(self, address: str, setting: str) -> grpc.aio.Server:
        port, metrics = self._ports[setting], self._parts.metrics
        callers = Callers(port.streams, port.calls, known_connections=2 * port.connections)
        policy = CallPolicy(metrics, callers, setting, self._parts.fleet.refuse_holder, self.config.limits.stall_s)
        interceptors = [*self._parts.traces.server_interceptors(), CallInterceptor(policy)]
        # One call more than the interceptor takes: it has the better words.
        server = grpc.aio.server(
            interceptors=interceptors, options=port.options(), maximum_concurrent_rpcs=port.calls + CALLS_BESIDE
        )
        credentials = None
        if self._certificates is not None:
            credentials = self._certificates.credentials(metrics.handshakes.labels(setting).inc)
        number = add_port(server, address, setting, credentials)
        self._addresses[setting] = f"{address.rpartition(':')[0]}:{number}"
        self._servers.append(server)
        return server

    def _serve_metrics(self) -> None:
        if self.config.metrics_listen is None:
            return
        host, port = split_address(self.config.metrics_listen)
        try:
            serving = Serving(self._connections.metrics, self.config.connections.handshake_s)
            port = self._open.enter_context(listening(self._parts.metrics.registry, host, port, serving))
        except OSError as error:
            raise SettingsError(
                f"metrics_listen: cannot listen on {self.config.metrics_listen}: {error.strerror}; choose another"
            ) from error
        self._addresses["metrics_listen"] = f"{host}:{port}"

    async def drain(self) -> None:
        """Nothing new; what is under way may finish within the grace, or is on disk and goes on after a restart."""
        log.info("draining", grace_s=self.config.drain_grace_s)
        self._parts.metrics.draining.set(1)
        for run in self._coordinator.runs():
            run.hold()
        self._parts.fleet.push_all(pb.AttendResponse(drain=pb.Drain(coordinator_leaving=True, reason="shutting down")))
        ends = time.monotonic() + self.config.drain_grace_s
        while time.monotonic() < ends and self._busy():  # noqa: ASYNC110 - two kinds of work, for seconds only
            await asyncio.sleep(0.05)

    def _busy(self) -> bool:
        return self._uploads.in_flight > 0 or any(run.stepping for run in self._coordinator.runs())

    async def stop(self) -> None:
        """Close everything, in the reverse order of opening."""
        await asyncio.gather(*(server.stop(0.2) for server in self._servers))
        await self._coordinator.close()
        await self._open.aclose()

    async def watch_certificates(self) -> None:
        """Take up those that are renewed."""
        if self._certificates is not None:
            await self._certificates.watch()

    async def watch_connections(self) -> None:
        """Look at who holds connections, and say so where they run out."""
        limits = {setting: port.connections for setting, port in self._ports.items()}
        limits["metrics_listen"] = self._connections.metrics
        await ConnectionWatch(self._addresses, limits, self._parts.metrics).watch()

    async def measure_lag(self) -> None:
        """Watch how late the loop wakes up."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_LAG_PERIOD_S)
            self._parts.metrics.loop_lag.observe(max(0.0, time.monotonic() - before - _LAG_PERIOD_S))


def warn_of_plain_text(config: ServerConfig) -> None:
    """Warn at every start: the setting may have been forgotten."""
    if config.insecure_remote:
        todo = "add [tls]: `fl ca init` makes the certificates"
        log.warning("insecure_remote", listen=config.listen, admin_listen=config.admin_listen, todo=todo)


async def serve(config: ServerConfig, folder: Folder | None = None) -> None:
    """Run a coordinator until SIGTERM or SIGINT; a second signal leaves at once, and nothing acknowledged is lost.

    folder: what folds the lines of the log.
    Raises StoreTaken when another coordinator has taken the ledger: then there is nothing to drain.
    """
    leaving, probes = asyncio.Event(), Health((service.SERVICE, admin.SERVICE))
    _listen_to_signals(asyncio.get_running_loop(), leaving.set)
    connections = allow_open_files(config.limits.max_clients, config.connections)
    await probes.listen(config.health_listen, ports(config, connections)["health_listen"])
    warn_of_plain_text(config)
    log.info("starting", state_dir=str(config.state_dir), pid=os.getpid(), **probes.addresses)
    ending = asyncio.create_task(_end_in_time(config, leaving, probes))
    try:
        server = await asyncio.to_thread(Server, config, probes, connections)
        await _serve(server, leaving, folder or Folder(0))
    finally:
        ending.cancel()
        await probes.close()
    log.info("stopped")


async def _serve(server: Server, leaving: asyncio.Event, folder: Folder) -> None:
    """From the recovery until everything is closed."""
    server.ledger.on_taken = leaving.set
    try:
        await server.start()
        works = (
            server.measure_lag(), server.watch_certificates(), server.watch_connections(), keep_telling(folder),
        )  # fmt: skip
        watching = [asyncio.create_task(work) for work in works]
        await leaving.wait()
        for task in watching:
            task.cancel()
        if server.ledger.taken is not None:
            raise server.ledger.taken
        await server.drain()
    finally:
        await server.stop()


async def _end_in_time(config: ServerConfig, leaving: asyncio.Event, probes: Health) -> None:
    """From the moment that the process is to leave: not ready any more, and not here for longer than the grace."""
    await leaving.wait()
    in_time = threading.Timer(config.drain_grace_s + STOP_S, leave_at_once, ["the grace is over"])
    in_time.daemon = True
    in_time.start()
    try:
        await probes.leave()
        await asyncio.get_running_loop().create_future()
    finally:
        in_time.cancel()


def _listen_to_signals(loop: asyncio.AbstractEventLoop, leave: Callable[[], None]) -> None:
    """The first signal asks for an end in good order; the next is obeyed wherever the program is, busy or not."""
    heard: list[int] = []

    def on_signal(number: int, _: object) -> None:
        if heard:
            leave_at_once("a second signal")
        heard.append(number)
        loop.call_soon_threadsafe(leave)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


def leave_at_once(why: str) -> None:
    """End the process as a crash would, which nothing that was acknowledged minds."""
    with suppress(RuntimeError):  # the signal may have come in the middle of another line
        log.warning("leaving_at_once", why=why)
    os._exit(EXIT_AT_ONCE)
