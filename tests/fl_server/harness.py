"""A whole coordinator in this process, without a network.

Ledger, spool and checkpoints are the real ones. A `Journal` counts what is written and can end the "process" behind any
write: from then on nothing is read or written any more, and a new `World` on the same folder is the restart.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from prometheus_client import CollectorRegistry

from fl_server.config import LimitsConfig, QuarantineConfig, ServerConfig, StatesConfig, TransfersConfig
from fl_server.coordinator import Coordinator
from fl_server.fleet import Fleet
from fl_server.ledger import Ledger
from fl_server.metrics import Metrics
from fl_server.operators import Operators
from fl_server.parts import Parts
from fl_server.run import Run
from fl_server.run_config import RunConfig, from_values
from fl_server.service import CoordinatorService
from fl_server.spool import Spool
from fl_server.spool_parts import PartFile
from fl_server.store.checkpoints import Checkpoints
from fl_server.store.files import Durability
from fl_server.store.held_parts import MostHeld
from fl_server.store.sql import open_sqlite
from fl_server.uploads import Uploads

TASK = "tests.integration.tiny_task:Tiny"
PATIENCE_S = 8.0
"""Until a test gives up: never a claim about speed."""
CHUNK = 1 << 16


def run_config(name: str = "r", **sections: Any) -> RunConfig:
    """Two rounds of FedCM with two clients each, on a model with BatchNorm; sections replace whole sections."""
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


async def until(probe: Callable[[], Any], what: str) -> Any:
    """The first true value of `probe`; the loop goes on meanwhile."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not (value := probe()):
                await asyncio.sleep(0.001)
            return value
    except TimeoutError:
        raise AssertionError(f"not within {PATIENCE_S:g} s: {what}") from None


class Killed(BaseException):
    """The process ended here. No Exception, for nobody may go on after it."""


class Journal:
    """Every write, in order. Behind the `dies_at`th one, or the first of that name, the process is dead."""

    def __init__(self, dies_at: int | str | None = None) -> None:
        self.writes: list[str] = []
        self.dead = False
        self.dies_at = dies_at
        self._lock = threading.Lock()

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Pass a call on; note it if it writes."""
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
    "create_run", "update_run", "open_attempt", "record_update", "drop_update", "fix_accepted", "refuse_accepted",
    "restart_round", "commit", "set_metrics", "set_seconds_left", "set_clients_seconds_left", "record_evaluation",
    "put_clients", "add_history", "clear_standing", "put_standing", "put_state_standings", "seal", "save",
}  # fmt: skip
"""What leaves something on the disk: of the ledger, of the spool, and of the checkpoints."""


class Mortal:
    """Stands for a store, a spool or checkpoints; its calls go by the journal."""

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
                result.seal = lambda: self._journal.call("seal", seal)  # type: ignore[method-assign]
            return result

        return call


def _pass_over_the_dead(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Nobody asks what became of a dead process's tasks."""
    if not isinstance(context.get("exception"), Killed):
        loop.default_exception_handler(context)


def _most_held(config: ServerConfig) -> MostHeld:
    return MostHeld(config.transfers.kept_files, config.transfers.kept_mib << 20)


class World:
    """One coordinator on a folder, from its start to its end."""

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
        **limits: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.journal = journal or Journal()
        self.config = ServerConfig(
            state_dir=folder,
            insecure=True,
            tasks=list(tasks),
            limits=LimitsConfig(**{"chunk_bytes": CHUNK, **limits}),
            quarantine=QuarantineConfig(**(quarantine or {})),
            transfers=TransfersConfig(**(transfers or {})),
            states=StatesConfig(**(states or {})),
            durability=durability,
        )
        metrics = Metrics(CollectorRegistry())
        ledger = Ledger(Mortal(open_sqlite(folder / "ledger.sqlite", durability), self.journal))  # type: ignore[arg-type]
        self.parts = Parts(
            config=self.config,
            ledger=ledger,
            checkpoints=Mortal(Checkpoints(folder / "checkpoints"), self.journal),  # type: ignore[arg-type]
            spool=Mortal(Spool(folder / "spool", durability, _most_held(self.config)), self.journal),  # type: ignore[arg-type]
            fleet=Fleet(ledger, self.config, metrics),
            metrics=metrics,
            compute=ThreadPoolExecutor(1),
            io=ThreadPoolExecutor(2),
            reads=ThreadPoolExecutor(1),
        )
        self.operators = Operators(ledger, self.parts.fleet)
        self.coordinator = Coordinator(self.parts)
        self.uploads = Uploads(self.parts)
        self.service = CoordinatorService(self.parts, self.coordinator, self.uploads)
        self.tasks: set[asyncio.Task[Any]] = set()

    @property
    def fleet(self) -> Fleet:
        """The clients."""
        return self.parts.fleet

    @property
    def store(self) -> Any:
        """The ledger's store, for a look after the event; it may be a dead one."""
        return self.parts.ledger.store._inner  # type: ignore[attr-defined]

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().set_exception_handler(_pass_over_the_dead)
        await self.parts.fleet.start()
        await self.coordinator.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        with suppress(Killed):
            await self.coordinator.close()
        for pool in (self.parts.compute, self.parts.io, self.parts.reads):
            pool.shutdown(wait=True, cancel_futures=True)
        self.parts.ledger.close()

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        """Do something beside the test, for as long as the world is there."""
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        return task

    async def create(self, **sections: Any) -> Run:
        """A new run."""
        return await self.coordinator.create(run_config(**sections), "admin")

    async def ended(self, run_id: str = "r") -> Run:
        """The run, once it is over."""
        run = self.coordinator.run(run_id)
        await until(lambda: run.ended and run.record.ended_at, f"{run_id} ends, it is in {run.state}")
        return run

    async def completed(self, run_id: str = "r") -> list[str]:
        """Digest of the model after each round, once the run has come to its proper end."""
        run = await self.ended(run_id)
        assert run.status == "completed", run.state.ending
        return [commit.model_digest for commit in run.log.commits.values()]

    def metric(self, name: str, /, **labels: str) -> float:
        """A metric's value; 0 where it was never touched."""
        return self.parts.metrics.registry.get_sample_value(name, labels) or 0.0
