"""Daemons in the test's process, connected to a scripted coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_client.app import Instruments, build
from fl_client.connection.link import RetryDelays
from fl_client.monitoring.logs import Progress
from fl_client.monitoring.metrics import Metrics
from fl_client.settings.config import ClientConfig
from fl_client.storage.state import StateDir
from fl_client.training.data import LocalTask
from fl_tasks import Shard
from tests.fl_client.fake_coordinator import FINGERPRINT, TIMEOUT_S, FakeCoordinator, TinyTask


@dataclass
class Running:
    """A daemon in this process."""

    stop: asyncio.Event
    task: asyncio.Task[bool]
    metrics: Metrics

    async def until(self, true: Callable[[], Any]) -> None:
        """Wait until a condition of the daemon holds."""
        async with asyncio.timeout(TIMEOUT_S):
            while not true():
                await asyncio.sleep(0.005)

    async def until_counted(self, name: str, value: float, **labels: str) -> None:
        """Wait until a metric has a value."""
        await self.until(lambda: self.count(name, **labels) == value)

    def count(self, name: str, **labels: str) -> float:
        """A metric's value."""
        return self.metrics.registry.get_sample_value(f"fl_client_{name}", labels) or 0.0


@dataclass
class Fleet:
    """Starts daemons against one coordinator, all with the same state directory."""

    coordinator: FakeCoordinator
    folder: Path
    task: TinyTask = field(default_factory=TinyTask)
    delays: RetryDelays = field(default_factory=lambda: RetryDelays(first=0.01, longest=0.05, blocked=0.05))

    @asynccontextmanager
    async def daemon(self, clock: Callable[[], float] = time.time, **settings: Any) -> AsyncIterator[Running]:
        """A daemon that attaches; it is stopped at the end, unless it has ended. clock: for its owner's hours."""
        config = ClientConfig.model_validate(
            {
                "client_id": "edge-1",
                "server": f"127.0.0.1:{self.coordinator.port}",
                "state_dir": self.folder,
                "task": {"name": "tiny"},
                "insecure": True,
                **settings,
            }
        )
        data = self.task.train_data(Shard())
        local = LocalTask("tiny", self.task, FINGERPRINT, data, data)
        metrics, stop = Metrics(), asyncio.Event()
        instruments = Instruments(metrics, Progress(), self.delays, clock)
        with StateDir(self.folder) as state:
            task = asyncio.create_task(build(config, [local], state, instruments).run(stop))
            running = Running(stop, task, metrics)
            try:
                yield running
            finally:
                stop.set()
                await asyncio.wait([task])
            task.result()
