"""Faults of a federation with a standby: deaths and kills of the leader, and cuts on each of its ways."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from fl_ops.errors import OpsError
from tests.chaos.fault import DidNotHappen
from tests.chaos.points import EVERY_ROUND, IN_OBJECTS, points
from tests.chaos.standby_cluster import StandbyCluster, moved_away
from tests.processes.process import eventually

POINTS = points(*EVERY_ROUND, *IN_OBJECTS)


class Fault(Protocol):
    """One fault with all its parameters."""

    @property
    def name(self) -> str:
        """The name under which it is counted."""
        ...

    def inject(self, cluster: StandbyCluster, run_id: str) -> float | None:
        """Cause it in the current round. Returns the Unix time from which no coordinator leads; None: one does."""
        ...


@dataclass(frozen=True)
class Death:
    """The leader dies at the nth pass of a point."""

    point: str
    nth: int

    @property
    def name(self) -> str:
        return f"death {self.point}"

    def inject(self, cluster: StandbyCluster, run_id: str) -> float | None:
        leader = cluster.server
        leader.orders.kill_at(self.point, self.nth)
        eventually(lambda: leader.exit_code is not None or over(cluster, run_id), f"the leader dies {self.point}")
        if leader.exit_code is None:
            raise DidNotHappen(f"the run was over before it reached: {self.point}")
        return time.time()


@dataclass(frozen=True)
class Kill:
    """SIGKILL of the leader at a random moment; of both if `both`; of its follower too if `again_s` is not None."""

    after_s: float
    again_s: float | None = None
    both: bool = False

    @property
    def name(self) -> str:
        return "kill both" if self.both else "kill leader" if self.again_s is None else "kill leader and follower"

    def inject(self, cluster: StandbyCluster, run_id: str) -> float | None:
        del run_id
        time.sleep(self.after_s)
        cluster.server.kill()
        if self.both:
            cluster.standby.kill()
            for each in cluster.candidates.values():
                each.start()
        elif self.again_s is not None:
            time.sleep(self.again_s)
            cluster.standby.kill()
            for each in cluster.candidates.values():
                each.start()
        return time.time()


@dataclass(frozen=True)
class KillStandby:
    """SIGKILL of the standby: nothing happens."""

    after_s: float
    name = "kill standby"

    def inject(self, cluster: StandbyCluster, run_id: str) -> float | None:
        del run_id
        time.sleep(self.after_s)
        cluster.standby.kill()
        return None


@dataclass(frozen=True)
class Terminate:
    """SIGTERM of the leader: it hands over."""

    after_s: float
    name = "terminate leader"

    def inject(self, cluster: StandbyCluster, run_id: str) -> float | None:
        del run_id
        time.sleep(self.after_s)
        began = time.time()
        code = cluster.server.terminate()
        assert code in {0, 130}, f"after SIGTERM the leader exited with {code}"
        return began


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP of the leader for some seconds, then SIGCONT."""

    after_s: float
    for_s: float

    @property
    def name(self) -> str:
        return f"freeze leader for {self.for_s:g} s"

    def inject(self, cluster: StandbyCluster, run_id: str) -> float | None:
        del run_id
        time.sleep(self.after_s)
        began = time.time()
        cluster.server.signal(signal.SIGSTOP)
        time.sleep(self.for_s)
        cluster.server.signal(signal.SIGCONT)
        return began if self.for_s > 10.0 else None


@dataclass(frozen=True)
class Cut:
    """One way of the leader is cut or silent for some seconds."""

    way: str
    how: str
    after_s: float
    for_s: float

    @property
    def name(self) -> str:
        return f"leader without {self.way} ({self.how})"

    def inject(self, cluster: StandbyCluster, run_id: str) -> float | None:
        del run_id
        time.sleep(self.after_s)
        began = time.time()
        relay = getattr(cluster.ways[cluster.name_of(cluster.server)], self.way)
        if relay is None:  # a folder, of which both are cut off
            cluster.folder.rename(moved_away(cluster.folder))
        else:
            getattr(relay, self.how)()
        time.sleep(self.for_s)
        if relay is None:
            moved_away(cluster.folder).rename(cluster.folder)
        return began if self.way == "database" else None


def over(cluster: StandbyCluster, run_id: str) -> bool:
    """Whether the run has ended, as far as can be asked."""
    try:
        return cluster.server.run(run_id).HasField("ended")
    except OpsError:
        return False


def moment(draw: Random) -> float:
    """A random time in seconds, up to about two rounds."""
    return round(draw.uniform(0.0, 0.8), 3)


def seconds_away(draw: Random) -> float:
    """How long a way is cut: longer than a lease."""
    return round(draw.uniform(12.0, 20.0), 1)


KILLS: dict[str, Callable[[Random], Fault]] = {
    **{
        f"death {point}": (lambda draw, point=point, write=write: Death(point, draw.randint(1, write.times)))  # type: ignore[misc]
        for point, write in POINTS.items()
    },
    "kill leader": lambda draw: Kill(moment(draw)),
    "kill leader and follower": lambda draw: Kill(moment(draw), round(draw.uniform(1.0, 5.0), 3)),
    "kill both": lambda draw: Kill(moment(draw), both=True),
    "kill standby": lambda draw: KillStandby(moment(draw)),
    "terminate leader": lambda draw: Terminate(moment(draw)),
}
CUTS: dict[str, Callable[[Random], Fault]] = {
    **{f"freeze {seconds}": (lambda draw, s=seconds: Freeze(moment(draw), s)) for seconds in (3.0, 15.0, 60.0)},  # type: ignore[misc]
    **{
        f"{way} {how}": (lambda draw, w=way, h=how: Cut(w, h, moment(draw), seconds_away(draw)))  # type: ignore[misc]
        for way in ("database", "store", "clients")
        for how in ("cut", "silence")
    },
}
