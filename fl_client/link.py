"""The session as work sees it: wait until there is one, call through it, try again when the link was cut."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from fl_client.connection.pace import Pace
from fl_client.errors import BrokenTransfer, Fenced, SessionLost, Unreachable
from fl_client.transport import Connection

T = TypeVar("T")

CALLS_PER_S, CALLS_AT_ONCE = 5.0, 100
"""How often calls that failed are made again, whatever the coordinator answers: in the long run, and at once."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds between tries: from `first`, doubling up to `longest`; `blocked` where only a person can help."""

    first: float = 0.2
    longest: float = 15.0
    blocked: float = 60.0
    look: float = 4.0
    """At most, between two looks at the files of certificates."""
    most: float = 3600.0
    """What a coordinator asks beyond is cut to this."""


class Backoff:
    """Waiting times that double, each cut by up to half at random so that a fleet does not come at once."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._next = waits.first

    def reset(self) -> None:
        """Something went well: start from the shortest wait."""
        self._next = self._waits.first

    def next(self) -> float:
        """Seconds to wait now."""
        wait, self._next = self._next, min(2 * self._next, self._waits.longest)
        return wait * random.uniform(0.5, 1.0)  # noqa: S311 - jitter is no secret

    def after(self, asked: float | None) -> float:
        """Seconds to wait where the coordinator asked for some; too few of them count as none."""
        if asked is None or asked < self._waits.first:
            return self.next()
        return min(asked, self._waits.most)


class Calls:
    """Counts the calls under way on one connection: `with calls: ...`."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self._count += 1
        self._none.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()

    async def over(self) -> None:
        """Wait until none is under way."""
        await self._none.wait()


@dataclass(frozen=True, slots=True)
class Session:
    """A session that is attended, and the connection it lives on."""

    id: str
    connection: Connection
    chunk_bytes: int
    """Bytes of data in a chunk that the coordinator likes best."""
    max_chunk_bytes: int
    """Largest chunk in either direction."""
    calls: Calls = field(default_factory=Calls, compare=False)
    """Those of work; who moves to another connection waits for them before leaving this one."""


class Link:
    """Holds the session of the moment. Work outlives sessions: it waits here for the next one."""

    def __init__(self, waits: Waits) -> None:
        self.waits = waits
        self._pace = Pace(CALLS_PER_S, CALLS_AT_ONCE)
        self._session: Session | None = None
        self._opened = asyncio.Event()

    @property
    def current(self) -> Session | None:
        """The session, if there is one."""
        return self._session

    def open(self, session: Session) -> None:
        """From now on calls go through this session."""
        self._session = session
        self._opened.set()

    def close(self) -> None:
        """The session's stream has ended."""
        self._session = None
        self._opened.clear()

    async def session(self) -> Session:
        """The session; waits for one while there is none."""
        while self._session is None:
            await self._opened.wait()
        return self._session

    async def patiently(self, call: Callable[[Session], Awaitable[T]], backoff: Backoff | None = None) -> T:
        """Call, again and again until it is answered. A call that makes progress resets the backoff that it shares."""
        backoff = backoff or Backoff(self.waits)
        while True:
            session = await self.session()
            try:
                with session.calls:
                    return await call(session)
            except (Unreachable, SessionLost, Fenced, BrokenTransfer) as error:
                await asyncio.sleep(max(backoff.after(error.wait), self._pace.delay()))
