"""The life of the coordinator's process: start, serve, drain, stop.

The first signal starts a drain, the second one ends the process at once.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import threading
from contextlib import ExitStack, suppress
from dataclasses import replace

import structlog
from prometheus_client import CollectorRegistry

from fl_common.logs import RepeatFilter, write_repeat_counts
from fl_common.metrics import serve_metrics
from fl_common.metrics_server import ServerLimits
from fl_common.settings import SettingsError, split_address
from fl_server.aggregation.outside_task.child import ForkServer
from fl_server.leadership import Standby, may_stand_by
from fl_server.metrics import Metrics
from fl_server.rpc import admin, service
from fl_server.rpc.health import Health
from fl_server.rpc.ports import Connections, allow_open_files, ports, warn_of_few_files
from fl_server.server import Begun, Server
from fl_server.settings.config import ServerConfig
from fl_server.store.state_directory import lock_directory

log = structlog.get_logger()

STOP_S = 2.0
"""Time for closing everything after the grace. A step or a disk that hangs ends with the process."""
EXIT_AT_ONCE = 130
EXIT_REPLACED = 3
"""Another coordinator leads, or the database was lost during a start: a restart waits as a standby."""


def warn_of_open_ports(config: ServerConfig) -> None:
    """Warn at every start: the setting may have been forgotten."""
    if config.insecure_remote:
        todo = "add [tls]: `fl ca init` makes the certificates"
        log.warning("insecure_remote", listen=config.listen, admin_listen=config.admin_listen, todo=todo)
    if config.tls is not None and config.tls.no_client_certificates:
        todo = "set tls.client_ca: anybody can register as any client"
        log.warning("no_client_certificates", listen=config.listen, admin_listen=config.admin_listen, todo=todo)


async def serve(config: ServerConfig, repeats: RepeatFilter | None = None, forks: ForkServer | None = None) -> None:
    """Run a coordinator until SIGTERM or SIGINT. A second signal ends it at once; nothing acknowledged is lost.

    repeats: limits repeated log lines. forks: starts the processes of tasks from outside.
    Raises StoreTakenOver when another coordinator has taken the ledger: then there is nothing to drain.
    """
    leaving, probes = asyncio.Event(), Health((service.SERVICE, admin.SERVICE))
    listen_to_signals(leaving)
    also = [name for name in ("enroll_listen", "token_listen") if getattr(config, name) is not None]
    connections = allow_open_files(config.limits.max_clients, config.connections, also)
    await probes.listen(config.health_listen, ports(config, connections)["health_listen"])
    log.info("starting", state_dir=str(config.state_dir), pid=os.getpid(), **probes.addresses)
    warn_of_open_ports(config)
    warn_of_few_files(config.limits, connections)
    ending = asyncio.create_task(end_in_time(leaving, config.drain_grace_s + STOP_S, probes))
    try:
        with ExitStack() as held:
            begun = await begin(config, connections, leaving, held)
            if begun is not None:
                server = await asyncio.to_thread(Server, config, probes, connections, replace(begun, forks=forks))
                await _serve(server, leaving, repeats or RepeatFilter(0))
    finally:
        ending.cancel()
        await probes.close()
    log.info("stopped")


async def begin(
    config: ServerConfig, connections: Connections, leaving: asyncio.Event, held: ExitStack
) -> Begun | None:
    """Serve the metrics, and wait until this coordinator leads if it may stand by; None: `leaving` was set before.

    held: closes the page of metrics.
    """
    metrics = Metrics(CollectorRegistry())
    address = _serve_metrics(config, connections, metrics, held)
    if not may_stand_by(config):
        return Begun(metrics, address)
    check_addresses(config)
    lock = await asyncio.to_thread(lock_directory, config.state_dir)
    opened = await Standby(config, lock, metrics).lead(leaving)
    if opened is None:
        lock.release()
        return None
    return Begun(metrics, address, opened)


def check_addresses(config: ServerConfig) -> None:
    """Raises SettingsError for a port that a standby could not use once it leads."""
    for setting in ("listen", "admin_listen", "enroll_listen", "token_listen", "web_listen"):
        if (address := getattr(config, setting)) is None:
            continue
        host, port = split_address(address)
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            with socket.create_server((host, port), family=family):
                pass
        except OSError as error:
            raise _no_port(setting, address, error) from error


def _no_port(setting: str, address: str, error: OSError) -> SettingsError:
    """A port that cannot be used. A coordinator is often started twice by mistake."""
    running = " (is this coordinator running already?)" if error.errno == errno.EADDRINUSE else ""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return SettingsError(f"{setting}: cannot listen on {address}: {reason}{running}; choose another")


def _serve_metrics(config: ServerConfig, connections: Connections, metrics: Metrics, held: ExitStack) -> str:
    """The address of the page of metrics; "" without one."""
    if config.metrics_listen is None:
        return ""
    host, port = split_address(config.metrics_listen)
    try:
        limits = ServerLimits(connections.metrics, config.connections.handshake_s)
        port = held.enter_context(serve_metrics(metrics.registry, (host, port), limits))
    except OSError as error:
        raise _no_port("metrics_listen", config.metrics_listen, error) from error
    return f"{host}:{port}"


async def _serve(server: Server, leaving: asyncio.Event, repeats: RepeatFilter) -> None:
    """Recover, serve, drain, and close everything."""
    server.ledger.on_taken = leaving.set
    try:
        await server.start()
        works = (
            server.metrics.measure_lag(), server.watch_certificates(), server.watch_connections(),
            server.remove_objects(), write_repeat_counts(repeats),
        )  # fmt: skip
        watching = [asyncio.create_task(work) for work in works]
        await leaving.wait()
        for task in watching:
            task.cancel()
        if server.ledger.taken is not None:
            _in_time(STOP_S, "another coordinator leads", EXIT_REPLACED)
            raise server.ledger.taken
        await server.drain()
    finally:
        await server.stop()


def listen_to_signals(leaving: asyncio.Event) -> None:
    """The first signal starts a drain. The second ends the process at once, even if the event loop is busy."""
    loop, received = asyncio.get_running_loop(), list[int]()

    def on_signal(number: int, _: object) -> None:
        if received:
            leave_at_once("a second signal")
        received.append(number)
        loop.call_soon_threadsafe(leaving.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)


async def end_in_time(leaving: asyncio.Event, grace_s: float, probes: Health) -> None:
    """Report not ready after the first signal, and end the process when the grace is over.

    Cancel it when everything is closed.
    """
    await leaving.wait()
    in_time = _in_time(grace_s, "the grace is over", EXIT_AT_ONCE)
    try:
        await probes.leave()
        await asyncio.get_running_loop().create_future()
    finally:
        in_time.cancel()


def _in_time(seconds: float, why: str, code: int) -> threading.Timer:
    """End the process after so many seconds, unless the timer is cancelled."""
    in_time = threading.Timer(seconds, leave_at_once, [why, code])
    in_time.daemon = True
    in_time.start()
    return in_time


def leave_at_once(why: str, code: int = EXIT_AT_ONCE) -> None:
    """End the process like a crash. Nothing acknowledged is lost."""
    with suppress(RuntimeError):  # the signal may have come in the middle of another line
        log.warning("leaving_at_once", why=why)
    os._exit(code)
