"""Faults of the workers beside two coordinators: deaths at their writes, kills, stops, and cuts on their ways."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.chaos.fault import DidNotHappen
from tests.chaos.points import EVERY_ROUND, IN_OBJECTS, points
from tests.chaos.standby_cluster import StandbyCluster
from tests.chaos.standby_faults import CUTS, KILLS, Fault, moment, over, seconds_away
from tests.processes.process import eventually

MOVED = frozenset({"part file", "chunk", "chunk's note", "seal"})
"""Writes that workers do in place of the coordinator."""
OF_BOTH = "part's object"
POINTS = points(*(write for write in (*EVERY_ROUND, *IN_OBJECTS) if write.name in {*MOVED, OF_BOTH}))


@dataclass(frozen=True)
class WorkerDeath:
    """The first worker that passes a point for the nth time dies there."""

    point: str
    nth: int

    @property
    def name(self) -> str:
        return f"worker's death {self.point}"

    def inject(self, cluster: StandbyCluster, run_id: str) -> None:
        for worker in cluster.workers:
            worker.orders.kill_at(self.point, self.nth)

        def died() -> bool:
            return any(worker.exit_code is not None for worker in cluster.workers)

        eventually(lambda: died() or over(cluster, run_id), f"a worker dies {self.point}")
        for worker in cluster.workers:
            worker.orders.cancel()
        if not died():
            raise DidNotHappen(f"the run was over before a worker reached: {self.point}")


@dataclass(frozen=True)
class WorkerEnd:
    """SIGKILL or SIGTERM of one worker, or of both, at a random moment."""

    signal: signal.Signals
    which: int | None
    after_s: float

    @property
    def name(self) -> str:
        return f"{self.signal.name} of {'a worker' if self.which is not None else 'both workers'}"

    def inject(self, cluster: StandbyCluster, run_id: str) -> None:
        del run_id
        time.sleep(self.after_s)
        ending = cluster.workers if self.which is None else [cluster.workers[self.which]]
        for worker in ending:
            worker.signal(self.signal)
        for worker in ending:
            assert worker.wait() in {0, -signal.SIGKILL}, f"{worker.name}: {worker.exit_code}, {worker.errors()}"


@dataclass(frozen=True)
class WorkerFreeze:
    """SIGSTOP of a worker for some seconds, then SIGCONT. New connections still reach it, and nobody answers."""

    which: int
    after_s: float
    for_s: float

    @property
    def name(self) -> str:
        return f"freeze worker for {self.for_s:g} s"

    def inject(self, cluster: StandbyCluster, run_id: str) -> None:
        del run_id
        time.sleep(self.after_s)
        cluster.workers[self.which].signal(signal.SIGSTOP)
        time.sleep(self.for_s)
        cluster.workers[self.which].signal(signal.SIGCONT)


@dataclass(frozen=True)
class WorkerCut:
    """One way of a worker, to both coordinators or to the store, is cut or silent for some seconds."""

    which: int
    way: str
    how: str
    after_s: float
    for_s: float

    @property
    def name(self) -> str:
        return f"worker without {self.way} ({self.how})"

    def inject(self, cluster: StandbyCluster, run_id: str) -> None:
        del run_id
        relays = getattr(cluster.workers[self.which], self.way)
        if not relays:
            raise DidNotHappen("the store is a folder, of which no worker alone is cut off")
        time.sleep(self.after_s)
        for relay in relays:
            getattr(relay, self.how)()
        time.sleep(self.for_s)


def _which(draw: Random) -> int:
    return draw.randrange(2)


def _end(draw: Random, ending: signal.Signals, *, both: bool = False) -> WorkerEnd:
    return WorkerEnd(ending, None if both else _which(draw), moment(draw))


KILLS_WITH_WORKERS: dict[str, Callable[[Random], Fault]] = {
    **{name: make for name, make in KILLS.items() if name.split(maxsplit=2)[-1] not in MOVED},
    **{
        f"worker's death {point}": (
            lambda draw, point=point, write=write: WorkerDeath(point, draw.randint(1, max(1, write.times // 2)))  # type: ignore[misc]
        )
        for point, write in POINTS.items()
    },
    "kill worker": lambda draw: _end(draw, signal.SIGKILL),
    "kill both workers": lambda draw: _end(draw, signal.SIGKILL, both=True),
    "terminate worker": lambda draw: _end(draw, signal.SIGTERM),
}
CUTS_WITH_WORKERS: dict[str, Callable[[Random], Fault]] = {
    **CUTS,
    **{
        f"freeze worker {seconds}": (lambda draw, s=seconds: WorkerFreeze(_which(draw), moment(draw), s))  # type: ignore[misc]
        for seconds in (3.0, 15.0, 60.0)
    },
    **{
        f"worker {way} {how}": (
            lambda draw, way=way, how=how: WorkerCut(_which(draw), way, how, moment(draw), seconds_away(draw))  # type: ignore[misc]
        )
        for way in ("coordinators", "store")
        for how in ("cut", "silence")
    },
}
