"""The current session, and calls through it that are retried after a cut connection."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from fl_client.connection.messages import M
from fl_client.connection.transport import GrpcTransport
from fl_client.errors import BrokenTransfer, FailedCall, Fenced, GivenUp, SessionLost, Unreachable
from fl_common.rate_limits import RateLimiter
from fl_common.units import counted
from protos.fl.v1 import coordinator_pb2 as pb

T = TypeVar("T")
SessionRequest = pb.AnswerStageRequest | pb.ReportEvaluationRequest | pb.ReportReleaseRequest

RETRIES_PER_S, RETRY_BURST = 5.0, 100
"""Limit of retried calls, whatever the coordinator answers."""

MAX_FAILED_CALLS = 10
"""Tries of one call in which the coordinator fails (INTERNAL), without progress in between: up to a minute."""


@dataclass(frozen=True, slots=True)
class RetryDelays:
    """Seconds between tries: from `first`, doubling up to `longest`; `blocked` where only a person can help."""

    first: float = 0.2
    longest: float = 15.0
    blocked: float = 60.0
    certificate_check: float = 4.0
    """Longest time between two checks of the certificate files."""
    max_requested: float = 3600.0
    """A longer wait that a coordinator requests is cut to this."""


class Backoff:
    """Delays that double. Each is reduced by up to half at random, so that a fleet does not retry at once."""

    def __init__(self, delays: RetryDelays) -> None:
        self._delays = delays
        self._next = delays.first
        self.failed_calls = 0
        """Calls since the last progress in which the coordinator failed."""

    def reset(self) -> None:
        """Return to the shortest delay, after a success."""
        self._next = self._delays.first
        self.failed_calls = 0

    def next(self) -> float:
        """Seconds to wait now."""
        wait, self._next = self._next, min(2 * self._next, self._delays.longest)
        return wait * random.uniform(0.5, 1.0)  # noqa: S311 - jitter is no secret

    def after(self, requested: float | None) -> float:
        """Seconds to wait where the coordinator requested some. A request below `first` is ignored."""
        if requested is None or requested < self._delays.first:
            return self.next()
        return min(requested, self._delays.max_requested)


class ActiveCalls:
    """Counts the calls in progress on one connection: `with calls: ...`."""

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

    async def finished(self) -> None:
        """Wait until no call is in progress."""
        await self._none.wait()


@dataclass(frozen=True, slots=True)
class Session:
    """An attended session and its connection."""

    id: str
    connection: GrpcTransport
    chunk_bytes: int
    """Chunk size that the coordinator prefers, in bytes of data."""
    max_chunk_bytes: int
    """Largest chunk in either direction."""
    calls: ActiveCalls = field(default_factory=ActiveCalls, compare=False)
    """Calls of assignments. A connection that is replaced is closed when they have finished."""


class Link:
    """Holds the current session. An assignment outlives sessions: its calls wait here for the next one."""

    def __init__(self, delays: RetryDelays) -> None:
        self.delays = delays
        self._limiter = RateLimiter(RETRIES_PER_S, RETRY_BURST)
        self.current: Session | None = None
        """The session, if there is one."""
        self._opened = asyncio.Event()

    def open(self, session: Session) -> None:
        """Send calls through this session from now on."""
        self.current = session
        self._opened.set()

    def close(self) -> None:
        """The session's stream has ended."""
        self.current = None
        self._opened.clear()

    async def session(self) -> Session:
        """The session. Waits while there is none."""
        while self.current is None:
            await self._opened.wait()
        return self.current

    async def ask(self, request: SessionRequest, response: type[M]) -> M:
        """The answer to a request, in whichever session there is one."""

        async def call(session: Session) -> M:
            request.session_id = session.id
            return await session.connection.call(request, response)

        return await self.call_with_retry(call)

    async def call_with_retry(self, call: Callable[[Session], Awaitable[T]], backoff: Backoff | None = None) -> T:
        """Call until there is an answer. A call that makes progress may reset the backoff that it shares.

        Raises:
            GivenUp: the coordinator failed in the call, `MAX_FAILED_CALLS` times without progress.
        """
        backoff = backoff or Backoff(self.delays)
        while True:
            session = await self.session()
            try:
                with session.calls:
                    return await call(session)
            except (Unreachable, SessionLost, Fenced, BrokenTransfer) as error:
                if isinstance(error, FailedCall):
                    backoff.failed_calls += 1
                    if backoff.failed_calls >= MAX_FAILED_CALLS:
                        raise GivenUp(f"failed {counted(backoff.failed_calls, 'time')} in a row: {error}") from error
                await asyncio.sleep(max(backoff.after(error.wait), self._limiter.delay()))
