"""Open calls: how many a caller may have at once, and their end with the caller's certificate or token.

A caller is the holder of a certificate; without certificates it is a connection. One caller cannot use up what others
need. The transport checks a certificate only in the handshake, and a stream may be open for months: an open call ends
soon after its caller's certificate or token has expired, and at once when it is revoked. Expiry is a time of the wall
clock, which may be set, so the clock is read periodically instead of being waited for once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from fl_server.enrollment.grants import Revocations
from fl_server.errors import Revoked, ServerError, TooMany
from fl_server.identity import Identity
from fl_server.rpc.requests import BadRequest

RETRY_S = 1.0
BLOCK_S = 10.0
"""A caller whose large request was refused is blocked for this long. The transport receives a message up to its own
limit before the method's limit can be checked; a caller that repeats such requests would use up memory."""
MOST_BLOCKED = 4096
"""Blocked callers that are remembered."""
CHECK_S = 1.0
"""Period of the checks, while such a call is open."""


class OpenCall:
    """One open call, which is closed once."""

    def __init__(self, limits: CallLimits, who: str, method: str) -> None:
        self._limits, self._who, self._method = limits, who, method
        self._closed = False

    @contextmanager
    def refusals_block(self) -> Iterator[None]:
        """A large request that is refused in this block blocks the caller for a while."""
        try:
            yield
        except BadRequest as error:
            if error.is_large:
                self._limits.block(self._who)
            raise

    def close(self) -> None:
        """Close the call. Further calls of this method do nothing."""
        if not self._closed:
            self._closed = True
            self._limits.closed(self._who, self._method)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CallLimits:
    """Counts the open calls of one server. Lives on the event loop."""

    def __init__(self, per_caller: int, in_all: int, known_connections: int = 1024) -> None:
        """known_connections: connections that are remembered, to count each once."""
        self._per_caller, self._in_all = per_caller, in_all
        self._open: dict[str, Counter[str]] = {}
        """Numbers of open calls by caller, then by method."""
        self._blocked: OrderedDict[str, float] = OrderedDict()
        """The end of the block of each caller."""
        self._count = 0
        self._most_known = known_connections
        self._connections: OrderedDict[str, None] = OrderedDict()

    def open(self, who: str, method: str, at_once: int) -> OpenCall:
        """Open a call of a method of which a caller may have `at_once` open. Raises TooMany."""
        name, own = method.rpartition("/")[2], self._open.get(who)
        if self._blocked and (blocked_s := self._blocked.get(who, 0.0) - time.monotonic()) > 0:
            raise TooMany("the caller's last large request was refused", math.ceil(blocked_s), routine=True)
        if own is not None and own[method] >= at_once:
            raise TooMany(f"one caller may have at most {at_once} calls of {name} open", RETRY_S, routine=True)
        if own is not None and own.total() >= self._per_caller:
            raise TooMany(f"one caller may have at most {self._per_caller} calls open", RETRY_S, routine=True)
        if self._count >= self._in_all:
            raise TooMany(f"{self._in_all} calls are open, which is the limit of this port", RETRY_S, routine=True)
        self._count += 1
        self._open.setdefault(who, Counter())[method] += 1
        return OpenCall(self, who, method)

    def closed(self, who: str, method: str) -> None:
        """A call was closed; a caller without an open call is dropped."""
        calls = self._open[who]
        self._count -= 1
        calls[method] -= 1
        if not calls[method]:
            del calls[method]
        if not calls:
            del self._open[who]

    def block(self, who: str) -> None:
        """Block a caller for a while."""
        self._blocked[who] = time.monotonic() + BLOCK_S
        self._blocked.move_to_end(who)
        if len(self._blocked) > MOST_BLOCKED:
            self._blocked.popitem(last=False)

    def is_new(self, connection: str) -> bool:
        """Whether this is a connection's first call."""
        if connection in self._connections:
            return False
        self._connections[connection] = None
        if len(self._connections) > self._most_known:
            self._connections.popitem(last=False)
        return True


class ExpiringCalls:
    """The open calls of one server, by the end of their callers' certificates. Lives on the event loop."""

    def __init__(self) -> None:
        self._by_end: dict[float, dict[asyncio.Task[object], Identity]] = {}
        self._ended: dict[asyncio.Task[object], ServerError] = {}
        """Tasks that were cancelled here, and why."""
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return sum(map(len, self._by_end.values()))

    @contextmanager
    def while_valid(self, who: Identity) -> Iterator[None]:
        """Register the current task's call as long as the block.

        Raises CertificateEnded when the certificate ends, Revoked when it is revoked.
        """
        task = asyncio.current_task()
        if who.ends is None or task is None:
            yield
            return
        self._by_end.setdefault(who.ends, {})[task] = who
        self._check_later()
        try:
            yield
        except asyncio.CancelledError:
            if (why := self._ended.get(task)) is None:
                raise
            task.uncancel()
            raise why from None
        finally:
            self._ended.pop(task, None)
            self._forget(who.ends, task)

    def end_denied(self, revocations: Revocations) -> int:
        """End the calls of callers whose certificates are revoked. Returns their number."""
        calls = [(task, who) for same_end in self._by_end.values() for task, who in same_end.items()]
        denied_calls = [(task, Revoked(str(who), why)) for task, who in calls if (why := revocations.denied(who))]
        for task, revoked in denied_calls:
            self._end(task, revoked)
        return len(denied_calls)

    def _forget(self, ends: float, task: asyncio.Task[object]) -> None:
        if (calls := self._by_end.get(ends)) is not None:
            calls.pop(task, None)
            if not calls:
                del self._by_end[ends]

    def _check_later(self) -> None:
        if self._timer is None and self._by_end:
            self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def _check(self) -> None:
        self._timer, now = None, time.time()
        for ends in [end for end in self._by_end if end <= now]:
            for task, who in self._by_end.pop(ends).items():
                self._end(task, who.ended())
        self._check_later()

    def _end(self, task: asyncio.Task[object], why: ServerError) -> None:
        if task not in self._ended:
            self._ended[task] = why
            task.cancel()
