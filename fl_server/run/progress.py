"""A run's progress while it happens: events for operators that watch it, trace spans of rounds, and log lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import structlog

from fl_common.tracing.traces import RoundSpan, Traces
from fl_server.rounds.state import Phase, RoundState
from fl_server.store.records import CommitRecord

log = structlog.get_logger()

T = TypeVar("T")

FREQUENT = frozenset({"admitted", "client_out"})
"""Events of single clients: thousands of them in a round. The others are few, and are always sent."""
FREQUENT_S = 0.25
"""Least time between two of them. Of those that come in between, the latest is sent when this time is over."""
_FAILURES = frozenset({"client_failed", "update_refused"})
"""Events that operators need to repair a device: they name client and reason, and neither run nor round."""
_OF_COHORTS = frozenset(
    {"clients", "cohort", "admitted", "accepted", "answered", "dropped", "bytes_down", "bytes_up", "first", "error"}
)
"""Values that tell how many clients, or which ones, take part."""


@dataclass(frozen=True)
class Progress:
    """One event of a run."""

    event: str
    """"phase", "admitted", "client_out", "committed", "evaluated" or "state"."""
    detail: str = ""
    commit: CommitRecord | None = None
    """The round of a "committed" or "evaluated" event."""
    _shown: list[Any] = field(default_factory=list, compare=False, repr=False)

    def shown(self, make: Callable[[], T]) -> T:
        """What watchers are sent, made once: the status of a run with thousands of clients takes milliseconds."""
        if not self._shown:
            self._shown.append(make())
        shown: T = self._shown[0]
        return shown


class Watchers:
    """All watchers of a run.

    A watcher that does not keep up misses events of single clients; it is disconnected before it misses another one.
    """

    _BACKLOG = 1000
    """Events that wait for a watcher: each may have a status of its own."""

    def __init__(self, *, hides_clients: bool = False) -> None:
        """hides_clients: events of single clients are not sent."""
        self._hides_clients = hides_clients
        self._queues: set[asyncio.Queue[Progress | None]] = set()
        self._latest: dict[str, tuple[Progress, int]] = {}
        """The latest event of each frequent kind that was not sent yet, and how many there are."""
        self._timer: asyncio.TimerHandle | None = None
        """Set for FREQUENT_S after a frequent event."""

    def publish(self, progress: Progress) -> None:
        """Send an event to every watcher."""
        if not self._queues or (self._hides_clients and progress.event in FREQUENT):
            return
        if progress.event not in FREQUENT:
            self._send_latest()  # they happened before
            self._send(progress)
        elif self._timer is None:
            self._send(progress)
            self._timer = asyncio.get_running_loop().call_later(FREQUENT_S, self._pause_over)
        else:
            _, count = self._latest.get(progress.event, (progress, 0))
            self._latest[progress.event] = progress, count + 1

    def _pause_over(self) -> None:
        self._timer = None
        if self._latest and self._queues:
            self._timer = asyncio.get_running_loop().call_later(FREQUENT_S, self._pause_over)
        self._send_latest()

    def _send_latest(self) -> None:
        latest, self._latest = self._latest, {}
        for progress, count in latest.values():
            more = f"; {count - 1} more before" if count > 1 else ""
            self._send(replace(progress, detail=f"{progress.detail}{more}"))

    def _send(self, progress: Progress) -> None:
        for queue in list(self._queues):
            if queue.qsize() < self._BACKLOG:
                queue.put_nowait(progress)
            elif progress.event not in FREQUENT:
                queue.put_nowait(None)
                self._queues.discard(queue)

    def end(self) -> None:
        """End all watchers' streams."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._send_latest()
        for queue in self._queues:
            queue.put_nowait(None)

    @contextmanager
    def watch(self) -> Iterator[AsyncIterator[Progress]]:
        """Events from now on."""
        queue: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._queues.add(queue)

        async def events() -> AsyncIterator[Progress]:
            while (progress := await queue.get()) is not None:
                yield progress

        try:
            yield events()
        finally:
            self._queues.discard(queue)


class RoundTrace:
    """The trace span of the round under way.

    It begins with the round's first draw, or with the restart that resumes the round, and ends with the commit.
    """

    def __init__(self, traces: Traces | None, run_id: str) -> None:
        """traces: None for a run whose clients' calls are in no trace."""
        self._traces, self._run_id = traces, run_id
        self._span: RoundSpan | None = None

    def phase_changed(self, before: Phase, state: RoundState) -> None:
        """The run entered another phase."""
        if self._traces is None:
            return
        if before is Phase.COMMITTING:
            self._end("committed")
        if state.phase is Phase.ENDED:
            self._end("abandoned")
        elif state.goal and state.phase is not Phase.EVALUATING:
            self._span_of(self._traces, state).phase(state.phase.value)

    def parent_for(self, state: RoundState) -> str:
        """The traceparent for an assignment of the round: the client's calls become part of the trace. May be empty."""
        return "" if self._traces is None else self._span_of(self._traces, state).traceparent

    def close(self) -> None:
        """End the span because the coordinator stops."""
        self._end("left")

    def _span_of(self, traces: Traces, state: RoundState) -> RoundSpan:
        if self._span is None:
            self._span = traces.round(self._run_id, state.round)
        return self._span

    def _end(self, outcome: str) -> None:
        if self._span is not None:
            self._span.end(outcome)
            self._span = None


class CohortLog:
    """Log lines about the clients of a run. If its cohorts are hidden, they tell only whose work failed."""

    def __init__(self, *, hidden: bool) -> None:
        """hidden: the run's cohorts are (`RunConfig.hides_cohorts`)."""
        self._hidden = hidden

    def info(self, event: str, **values: object) -> None:
        """Log an event that is expected."""
        if (shown := self._shown(event, values)) is not None:
            log.info(event, **shown)

    def warning(self, event: str, **values: object) -> None:
        """Log an event that somebody may have to act on."""
        if (shown := self._shown(event, values)) is not None:
            log.warning(event, **shown)

    def _shown(self, event: str, values: dict[str, object]) -> dict[str, object] | None:
        """The values that may be logged; None if the event may not be."""
        if not self._hidden:
            return values
        if event in _FAILURES:
            return {name: value for name, value in values.items() if name not in {"run", "round"}}
        if "client" in values:
            return None
        return {name: value for name, value in values.items() if name not in _OF_COHORTS}
