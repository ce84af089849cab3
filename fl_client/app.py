"""Composition root: the only place where the daemon's concrete parts are chosen and put together."""

from __future__ import annotations

import asyncio
import signal
import uuid
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import structlog

from fl_client import device as devices
from fl_client.attendance import Attendance
from fl_client.bundles import BundleCache
from fl_client.config import ClientConfig, split_address
from fl_client.daemon import Daemon
from fl_client.data import LocalTask, load_local_task
from fl_client.desk import Tools
from fl_client.identity import identity_of
from fl_client.link import Link, Waits
from fl_client.logs import Progress
from fl_client.metrics import Metrics
from fl_client.state import StateDir
from fl_client.training import Trainer
from fl_client.transport import GrpcTransport, TlsFiles
from fl_client.updates import PendingUpdates
from fl_client.worker import Worker
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN

log = structlog.get_logger()


def run(config: ClientConfig, progress: Progress) -> bool:
    """Run a daemon until a signal ends it. False: a training step would not end, so the process must be ended hard.

    Raises:
        StartError: it cannot start.
        Fenced: another daemon uses its identity.
    """
    client_id = identity_of(config)
    metrics = Metrics()
    with ExitStack() as held:
        state = held.enter_context(StateDir(config.state_dir))
        state.claim(client_id)
        if config.metrics_listen is not None:
            held.enter_context(metrics.listening(*split_address(config.metrics_listen)))
        device = devices.choose(config.device)
        progress.say("loading the task's data")
        local = load_local_task(config, state, device)
        log.info(
            "starting", client=client_id, server=config.server, task=local.name, examples=len(local.train), device=str(device)
        )
        hello = _hello(config, client_id, local)
        hello.device.CopyFrom(devices.describe(device))
        updates = PendingUpdates(state.pending)
        return asyncio.run(_until_signal(config, hello, partial(_tools, config, Trainer(local, device), updates, metrics, progress)))


