"""The real daemon as a simulated process: all of `app.run` but its signals, with a task of a few numbers."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fl_client.app import Instruments, build
from fl_client.audit import log as audit_log
from fl_client.connection.link import RetryDelays
from fl_client.connection.transport import GrpcTransport
from fl_client.monitoring.logs import Progress
from fl_client.monitoring.metrics import Metrics
from fl_client.privacy.files import AccountFiles
from fl_client.settings.config import ClientConfig
from fl_client.storage.state import StateDir
from fl_client.training.data import LocalTask, load_local_task
from fl_client.training.trainer import Trainer
from tests.deterministic.certificates import tls_of
from tests.deterministic.channel import Channel
from tests.deterministic.coordinator import TASK
from tests.deterministic.loop import CURRENT, Threads
from tests.deterministic.network import Network

audit_log.ThreadPoolExecutor = Threads  # type: ignore[attr-defined, assignment]  # the last pool that is no argument

CLIENTS = 8


def settings(name: str, folder: Path, model: str, policy: Path | None = None) -> ClientConfig:
    """A daemon's settings. policy: the file of its site."""
    index = int(name.rpartition("-")[2])
    return ClientConfig.model_validate(
        {
            "client_id": name,
            "server": "127.0.0.1:1",
            "state_dir": folder,
            "tls": {**tls_of("client", name), "min_version": "1.2"},
            "device": "cpu",
            "task": {"name": TASK, "options": {"model": model, "kept": 4}},
            "shard": {"partition": {"method": "iid", "clients": CLIENTS, "seed": 0}, "index": index},
            "policy": policy,
        }
    )


class NoShard:
    """Makes the shard without a directory."""

    def shard(self, configured: dict[str, Any], make: Any, title: str = "") -> Any:
        return make()


@cache
def local_task(name: str, model: str) -> LocalTask:
    """The task with the client's data, the same for each of its starts."""
    return load_local_task(settings(name, Path("unused"), model), NoShard(), torch.device("cpu"))


class Transport(GrpcTransport):
    """The product's transport over a simulated channel."""

    def __init__(self, channel: Channel) -> None:
        self._simulated: Any = channel
        super().__init__("127.0.0.1:1")

    def _opened(self, address: str) -> Any:
        return self._simulated


async def run_daemon(config: ClientConfig, model: str, network: Network, *, private: bool = False) -> None:
    """Run one daemon until it is killed. Runs in its process. private: it has an account from its first start."""
    process, name = CURRENT.get(), str(config.client_id)
    assert process is not None
    state = StateDir(config.state_dir)
    state.__enter__()
    process.on_kill.append(lambda: state.__exit__(None, None, None))
    if private:
        AccountFiles(state.path).begin()
    state.claim(name)
    local = local_task(name, model)

    def connect(*_: Any, **__: Any) -> Transport:
        return Transport(Channel(network, name, process))

    instruments = Instruments(
        Metrics(), Progress(), RetryDelays(), trainers=[Trainer(local)], threads=Threads, transport=connect
    )
    daemon = build(config, [local], state, instruments)
    await daemon.run(asyncio.Event())
