"""What happens to the connections between daemons and coordinator: cut, damaged, held, gone."""

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
from tests.integration.processes import eventually

if TYPE_CHECKING:
    from tests.chaos.arena import Arena

DAEMONS = 4
CHUNKS = 4
"""Chunks of a model that are large enough for a proxy to see."""


@dataclass(frozen=True)
class Point:
    """A chunk on the way of one daemon."""

    daemon: int
    direction: Direction
    message: int


@dataclass(frozen=True)
class Cut:
    """The connection ends at a chunk, and the daemon comes back at once."""

    point: Point
    where: Where
    action: Action
    takes_away = False

    @property
    def name(self) -> str:
        return f"cut {self.point.direction} {self.where}"

    def inject(self, arena: Arena, run_id: str) -> None:
        proxy = proxy_of(arena, self.point.daemon)
        with healed(proxy):
            happen(arena, proxy.cut(self.point.direction, self.point.message, self.where, self.action))


@dataclass(frozen=True)
class Hold:
    """A stream stands still at a chunk for a while, and goes on."""

    point: Point
    for_s: float
    takes_away = False

    @property
    def name(self) -> str:
        return f"hold {self.point.direction}"

    def inject(self, arena: Arena, run_id: str) -> None:
        proxy = proxy_of(arena, self.point.daemon)
        with healed(proxy):
            happen(arena, proxy.cut(self.point.direction, self.point.message, "inside", "hold"))
            time.sleep(self.for_s)


@dataclass(frozen=True)
class Corrupt:
    """One bit of a chunk is another one, under a wrong checksum or, `sealed`, under the right one."""

    point: Point
    sealed: bool
    takes_away = False

    @property
    def name(self) -> str:
        return f"corrupt {self.point.direction}{' under a right checksum' if self.sealed else ''}"

    def inject(self, arena: Arena, run_id: str) -> None:
        proxy = proxy_of(arena, self.point.daemon)
        with healed(proxy):
            happen(arena, proxy.corrupt(self.point.direction, self.point.message, sealed=self.sealed))


@dataclass(frozen=True)
class Away:
    """The coordinator's address is out of reach for some daemons, for a while."""

    daemons: tuple[int, ...]
    for_s: float
    takes_away = False
    name = "out of reach"

    def inject(self, arena: Arena, run_id: str) -> None:
        proxies = [proxy_of(arena, index) for index in self.daemons]
        try:
            for proxy in proxies:
                proxy.away()
            time.sleep(self.for_s)
        finally:
            for proxy in proxies:
                proxy.back()


@dataclass(frozen=True)
class Reset:
    """Every connection of every daemon is reset, again and again."""

    times: int
    every_s: float
    takes_away = False
    name = "reset all connections"

    def inject(self, arena: Arena, run_id: str) -> None:
        dropped = 0
        for _ in range(self.times):
            dropped += sum(proxy.drop() for proxy in arena.proxies.values())
            time.sleep(self.every_s)
        if not dropped:
            raise DidNotHappen("nobody was connected")


def proxy_of(arena: Arena, daemon: int) -> Proxy:
    """The proxy before a daemon."""
    return list(arena.proxies.values())[daemon]


def happen(arena: Arena, trap: Trap) -> None:
    """Wait until a trap has snapped. Raises DidNotHappen when the run is over without."""
    eventually(lambda: trap.snapped.is_set() or arena.over(), f"{trap} snaps, or the run is over")
    if not trap.snapped.is_set():
        raise DidNotHappen("no stream came so far before the run was over")


@contextmanager
def healed(proxy: Proxy) -> Iterator[None]:
    """Afterwards the proxy passes on, whatever happened."""
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


def _away(draw: Random) -> Fault:
    daemons = draw.sample(range(DAEMONS), draw.randint(1, DAEMONS))
    return Away(tuple(sorted(daemons)), round(draw.uniform(0.2, 3.0), 3))


UP: Direction = "up"
DOWN: Direction = "down"
WHERES: tuple[Where, ...] = ("before", "inside", "behind")
MAKE: list[Callable[[Random], Fault]] = [
    *(partial(_cut, direction, where) for direction in (UP, DOWN) for where in WHERES),
    *(partial(_hold, direction) for direction in (UP, DOWN)),
    *(partial(_corrupt, direction, sealed) for direction in (UP, DOWN) for sealed in (False, True)),
    _away,
    lambda draw: Reset(draw.randint(1, 4), round(draw.uniform(0.05, 0.5), 3)),
]
FAULTS: dict[str, Callable[[Random], Fault]] = {make(Random(0)).name: make for make in MAKE}
