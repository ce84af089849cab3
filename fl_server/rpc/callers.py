"""Calls that are open, by caller: how many at once, and how many of them bring a request at the same time.

A caller is who its certificate names; without certificates it is a connection. One caller can use up what is its own,
and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from typing import Self

from fl_server.errors import TooMany

READS_AT_ONCE = 4
"""Requests of one caller that are received at the same time; further ones wait. Each may be a whole message of the
transport's largest size before its own method's limit can be looked at."""
RETRY_S = 1.0


class _Caller:
    """What one caller has open."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        """By method."""
        self.reads = asyncio.Semaphore(READS_AT_ONCE)


class Place:
    """One call's place among the open ones; it is given back once."""

    def __init__(self, callers: Callers, who: str, method: str) -> None:
        self._callers, self._who, self._method = callers, who, method
        self._left = False

    @property
    def reads(self) -> asyncio.Semaphore:
        """To be held while the request is received."""
        return self._callers.of(self._who).reads

    def leave(self) -> None:
        """The call is over. A second call does nothing."""
        if not self._left:
            self._left = True
            self._callers.left(self._who, self._method)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class Callers:
    """The open calls of one server. Lives on the event loop."""

    def __init__(self, per_caller: int, in_all: int, known_connections: int = 1024) -> None:
        """known_connections: so many are remembered, to count each once."""
        self._per_caller, self._in_all = per_caller, in_all
        self._open: dict[str, _Caller] = {}
        self._count = 0
        self._most_known = known_connections
        self._connections: OrderedDict[str, None] = OrderedDict()

    def enter(self, who: str, method: str, at_once: int) -> Place:
        """A place for a call of a method of which a caller may have `at_once` open. Raises TooMany."""
        name, found = method.rpartition("/")[2], self._open.get(who)
        if found is not None and found.calls[method] >= at_once:
            raise TooMany(f"at most {at_once} calls of {name} at once are taken of one caller", RETRY_S, routine=True)
        if found is not None and found.calls.total() >= self._per_caller:
            raise TooMany(f"at most {self._per_caller} calls at once are taken of one caller", RETRY_S, routine=True)
        if self._count >= self._in_all:
            raise TooMany(f"{self._in_all} calls are open, which is the limit of this port", RETRY_S, routine=True)
        self._count += 1
        self._open.setdefault(who, _Caller()).calls[method] += 1
        return Place(self, who, method)

    def left(self, who: str, method: str) -> None:
        """A call is over; nothing is kept of a caller without one."""
        caller = self._open[who]
        self._count -= 1
        caller.calls[method] -= 1
        if not caller.calls[method]:
            del caller.calls[method]
        if not caller.calls:
            del self._open[who]

    def of(self, who: str) -> _Caller:
        """A caller with open calls."""
        return self._open[who]

    def is_new(self, connection: str) -> bool:
        """Whether this is a connection's first call."""
        if connection in self._connections:
            return False
        self._connections[connection] = None
        if len(self._connections) > self._most_known:
            self._connections.popitem(last=False)
        return True
