"""Composition root: the only place where the daemon's concrete parts are chosen and put together."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import structlog

from fl_client import device as devices
from fl_client.allocator import keep_freed_memory
from fl_client.attendance import Attendance, Door
from fl_client.bundles import BundleCache
from fl_client.certificates import Certificates
from fl_client.config import ClientConfig
from fl_client.daemon import Daemon
from fl_client.data import LocalTask, load_local_task
from fl_client.disk import Disk
from fl_client.errors import StartError
from fl_client.gatekeeper import Gatekeeper
from fl_client.gates.make import Surroundings, gates_of
from fl_client.gates.panel import Panel
from fl_client.identity import identity_of
from fl_client.link import Link, Waits
from fl_client.logs import Progress
from fl_client.metrics import Metrics
from fl_client.shelf import Shelf
from fl_client.state import FILES, StateDir
from fl_client.storage.room import Room
from fl_client.training import Trainer
from fl_client.transport import GrpcTransport
from fl_client.work import Tools
from fl_client.worker import Worker
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2
from protos.metrics import installed
from protos.private_files import tighten
from protos.settings import SettingsError, split_address
from protos.traces import UNTRACED, Traces, open_traces
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN

log = structlog.get_logger()


def run(config: ClientConfig, progress: Progress) -> bool:
    """Run a daemon until a signal ends it. False: a training step would not end, so the process must be ended hard.

    Raises:
        StartError: it cannot start.
    """
    client_id, metrics = identity_of(config), Metrics()
    with ExitStack() as held:
        state = held.enter_context(StateDir(config.state_dir))
        if still := tighten(state.path, FILES):
            log.warning("state_is_open_to_others", files=len(still), first=str(still[0]), todo="chmod -R go= state_dir")
        state.claim(client_id)
        if config.metrics_listen is not None:
            held.enter_context(metrics.listening(*split_address(config.metrics_listen)))
        traces = _traces()
        held.callback(traces.close)
        device = devices.choose(config.device)
        keep_freed_memory()
        progress.say("loading the task's data")
        local = load_local_task(config, state, device)
        metrics.about(device, len(local.train), config.state_dir)
        if config.insecure_remote:  # at every start: who set it once may have forgotten it
            log.warning("insecure_remote", server=config.server, todo="add [tls]: ca, cert and key")
        log.info("starting", client=client_id, task=local.name, examples=len(local.train), device=str(device))
        instruments = Instruments(metrics, progress, traces=traces)
        return asyncio.run(_until_signal(lambda: build(config, local, state, instruments)))


@dataclass(frozen=True, slots=True)
class Instruments:
    """What a daemon is watched with, and its waiting times."""

    metrics: Metrics
    progress: Progress
    waits: Waits = field(default_factory=Waits)
    clock: Callable[[], float] = time.time
    """Unix seconds, for the owner's hours."""
    traces: Traces = UNTRACED


def build(config: ClientConfig, local: LocalTask, state: StateDir, instruments: Instruments) -> Daemon:
    """Wire one daemon, inside a running event loop.

    Raises:
        ConfigError: the TLS files cannot be used.
        StartError: what a gate looks at is not on this device.
    """
    link, worker = Link(replace(instruments.waits, most=config.limits.max_wait_s)), Worker(config.threads)
    around = Surroundings(local.train.inputs.device, worker.idle_for, instruments.clock)
    panel = Panel(gates_of(config.gates, around), config.gates.open_after_s)
    tools = Tools(
        link=link,
        bundles=BundleCache(link, config.max_bundle_bytes, instruments.metrics.received),
        trainer=Trainer(local, compute=devices.Compute(config.precision, config.memory_format)),
        worker=worker,
        disk=Disk(),
        shelf=Shelf(state.pending, state.states, Room(config.limits.max_runs, config.limits.max_kept_bytes)),
        gatekeeper=Gatekeeper(panel, config.gates, instruments.metrics, instruments.clock),
        metrics=instruments.metrics,
        progress=instruments.progress,
        traces=instruments.traces,
        limits=config.limits,
    )
    hello = _hello(config, local)

    def hello_now() -> pb.RegisterRequest:
        now = pb.RegisterRequest(availability=tools.gatekeeper.introduce())
        now.MergeFrom(hello)
        return now

    return Daemon(Attendance(hello_now, _door(config, instruments), link), tools)


async def _until_signal(build: Callable[[], Daemon]) -> bool:
    """Run until SIGTERM or SIGINT. A second one ends the process at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        log.info("stopping", signal=number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return await build().run(stop)


def _door(config: ClientConfig, instruments: Instruments) -> Door:
    """The way in. Raises ConfigError now, not later, when the TLS files cannot be used."""
    traces = instruments.traces
    if config.tls is None:
        return Door(config.server, lambda: GrpcTransport(config.server, traces=traces))
    certificates = Certificates(config.tls, identity_of(config), (instruments.metrics, instruments.waits))
    return Door(config.server, lambda: GrpcTransport(config.server, certificates.fresh(), traces), certificates.renewed)


def _traces() -> Traces:
    """Raises StartError where they are asked for and cannot be had."""
    try:
        return open_traces("fl-client")
    except SettingsError as error:
        raise StartError(str(error)) from None


def _hello(config: ClientConfig, local: LocalTask) -> pb.RegisterRequest:
    """What this daemon says of itself in every registration of this process."""
    return pb.RegisterRequest(
        client_id=identity_of(config),
        instance_id=uuid.uuid4().hex,
        protocol=pb.ProtocolRange(min=PROTOCOL_MIN, max=PROTOCOL_MAX),
        software=f"impetus {installed('impetus-fl')}",
        labels=config.labels,
        device=devices.describe(local.train.inputs.device),
        tasks=[local.offer()],
        encodings=[tensor_pb2.ENCODING_PLAIN],
    )
