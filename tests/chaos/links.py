"""Faults of the connections between daemons and coordinator: cut, damage, hold, refusal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from tests.chaos.fault import DidNotHappen, Fault
from tests.chaos.proxy import Proxy
from tests.chaos.traps import Action, Direction, Trap, Where
from tests.processes.process import eventually

if TYPE_CHECKING:
    from tests.chaos.cluster import ChaosCluster

DAEMONS = 4
CHUNKS = 4
"""Chunks of a model that the proxy recognizes by their size."""


@dataclass(frozen=True)
class Point:
    """A chunk to or from one daemon."""

    daemon: int
    direction: Direction
    message: int


@dataclass(frozen=True)
class Cut:
    """The connection ends at a chunk, and the daemon reconnects at once."""

    point: Point
    where: Where
    action: Action
    may_lose_update = False

    @property
    def name(self) -> str:
        return f"cut {self.point.direction} {self.where}"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        proxy = proxy_of(cluster, self.point.daemon)
        with restored(proxy):
            wait_for(cluster, proxy.cut(self.point.direction, self.point.message, self.where, self.action))


@dataclass(frozen=True)
class Hold:
    """A stream stops at a chunk for a while and then continues."""

    point: Point
    for_s: float
    may_lose_update = False

    @property
    def name(self) -> str:
        return f"hold {self.point.direction}"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        proxy = proxy_of(cluster, self.point.daemon)
        with restored(proxy):
            wait_for(cluster, proxy.cut(self.point.direction, self.point.message, "inside", "hold"))
            time.sleep(self.for_s)


@dataclass(frozen=True)
class Corrupt:
    """One bit of a chunk is flipped. Its checksum is wrong, or correct if `sealed`."""

    point: Point
    sealed: bool
    may_lose_update = False

    @property
    def name(self) -> str:
        return f"corrupt {self.point.direction}{' under a right checksum' if self.sealed else ''}"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        proxy = proxy_of(cluster, self.point.daemon)
        with restored(proxy):
            wait_for(cluster, proxy.corrupt(self.point.direction, self.point.message, sealed=self.sealed))


@dataclass(frozen=True)
class Unreachable:
    """Some daemons cannot reach the coordinator for a while."""

    daemons: tuple[int, ...]
    for_s: float
    may_lose_update = False
    name = "out of reach"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        proxies = [proxy_of(cluster, index) for index in self.daemons]
        try:
            for proxy in proxies:
                proxy.away()
            time.sleep(self.for_s)
        finally:
            for proxy in proxies:
                proxy.back()


@dataclass(frozen=True)
class Reset:
    """Every connection of every daemon is reset several times."""

    times: int
    every_s: float
    may_lose_update = False
    name = "reset all connections"

    def inject(self, cluster: ChaosCluster, run_id: str) -> None:
        dropped = 0
        for _ in range(self.times):
            dropped += sum(proxy.drop() for proxy in cluster.proxies.values())
            time.sleep(self.every_s)
        if not dropped:
            raise DidNotHappen("no daemon was connected")


def proxy_of(cluster: ChaosCluster, daemon: int) -> Proxy:
    """The proxy before a daemon."""
    return list(cluster.proxies.values())[daemon]


def wait_for(cluster: ChaosCluster, trap: Trap) -> None:
    """Wait until a trap was triggered. Raises DidNotHappen if the run ends before."""
    eventually(lambda: trap.triggered.is_set() or cluster.over(), f"{trap} is triggered, or the run is over")
    if not trap.triggered.is_set():
        raise DidNotHappen("no stream reached the message before the run was over")


@contextmanager
def restored(proxy: Proxy) -> Iterator[None]:
    """Remove all traps of the proxy after the block."""
    try:
        yield
    finally:
        proxy.pass_on()


def _point(direction: Direction, draw: Random) -> Point:
    return Point(draw.randrange(DAEMONS), direction, draw.randint(1, CHUNKS))


def _cut(direction: Direction, where: Where, draw: Random) -> Fault:
    return Cut(_point(direction, draw), where, draw.choice(["reset", "end"]))


def _hold(direction: Direction, draw: Random) -> Fault:
    return Hold(_point(direction, draw), round(draw.uniform(0.2, 2.0), 3))


def _corrupt(direction: Direction, sealed: bool, draw: Random) -> Fault:
    return Corrupt(_point(direction, draw), sealed)


def _unreachable(draw: Random) -> Fault:
    daemons = draw.sample(range(DAEMONS), draw.randint(1, DAEMONS))
    return Unreachable(tuple(sorted(daemons)), round(draw.uniform(0.2, 3.0), 3))


UP: Direction = "up"
DOWN: Direction = "down"
WHERES: tuple[Where, ...] = ("before", "inside", "behind")
MAKE: list[Callable[[Random], Fault]] = [
    *(partial(_cut, direction, where) for direction in (UP, DOWN) for where in WHERES),
    *(partial(_hold, direction) for direction in (UP, DOWN)),
    *(partial(_corrupt, direction, sealed) for direction in (UP, DOWN) for sealed in (False, True)),
    _unreachable,
    lambda draw: Reset(draw.randint(1, 4), round(draw.uniform(0.05, 0.5), 3)),
]
FAULTS: dict[str, Callable[[Random], Fault]] = {make(Random(0)).name: make for make in MAKE}
