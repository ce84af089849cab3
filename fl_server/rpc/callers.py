"""Calls that are open, by caller: how many at once, and how many of them bring a request at the same time.

A caller is who its certificate names; without certificates it is a connection. One caller can use up what is its own,
and nothing else.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from fl_server.errors import TooMany
from fl_server.rpc.requests import BadRequest

RETRY_S = 1.0
REST_S = 10.0
"""A caller that sent a large request which was refused is not listened to for so long. The transport receives a message
of its own largest size whole before a method's limit can be looked at: again and again, that would be the caller's
share of our memory."""
MOST_RESTING = 4096
"""Callers that are remembered for it."""


class Place:
    """One call's place among the open ones; it is given back once."""

    def __init__(self, callers: Callers, who: str, method: str) -> None:
        self._callers, self._who, self._method = callers, who, method
        self._left = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A large request that is refused meanwhile is the caller's last for a while."""
        try:
            yield
        except BadRequest as error:
            if error.is_large:
                self._callers.rest(self._who)
            raise

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
        self._open: dict[str, Counter[str]] = {}
        """By caller, then by method."""
        self._resting: OrderedDict[str, float] = OrderedDict()
        """Until when, by caller."""
        self._count = 0
        self._most_known = known_connections
        self._connections: OrderedDict[str, None] = OrderedDict()

    def enter(self, who: str, method: str, at_once: int) -> Place:
        """A place for a call of a method of which a caller may have `at_once` open. Raises TooMany."""
        name, found = method.rpartition("/")[2], self._open.get(who)
        if self._resting and (rests_s := self._resting.get(who, 0.0) - time.monotonic()) > 0:
            raise TooMany("the caller's last large request was refused", math.ceil(rests_s), routine=True)
        if found is not None and found[method] >= at_once:
            raise TooMany(f"at most {at_once} calls of {name} at once are taken of one caller", RETRY_S, routine=True)
        if found is not None and found.total() >= self._per_caller:
            raise TooMany(f"at most {self._per_caller} calls at once are taken of one caller", RETRY_S, routine=True)
        if self._count >= self._in_all:
            raise TooMany(f"{self._in_all} calls are open, which is the limit of this port", RETRY_S, routine=True)
        self._count += 1
        self._open.setdefault(who, Counter())[method] += 1
        return Place(self, who, method)

    def left(self, who: str, method: str) -> None:
        """A call is over; nothing is kept of a caller without one."""
        calls = self._open[who]
        self._count -= 1
        calls[method] -= 1
        if not calls[method]:
            del calls[method]
        if not calls:
            del self._open[who]

    def rest(self, who: str) -> None:
        """Do not listen to a caller for a while."""
        self._resting[who] = time.monotonic() + REST_S
        self._resting.move_to_end(who)
        if len(self._resting) > MOST_RESTING:
            self._resting.popitem(last=False)

    def is_new(self, connection: str) -> bool:
        """Whether this is a connection's first call."""
        if connection in self._connections:
            return False
        self._connections[connection] = None
        if len(self._connections) > self._most_known:
            self._connections.popitem(last=False)
        return True
