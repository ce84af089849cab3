"""The time limit of one assignment, and a step of training that does not end."""

from __future__ import annotations

import asyncio
from types import TracebackType

import structlog

from fl_client.connection.messages import seconds_of
from fl_client.errors import beyond_limits
from fl_client.gates.availability import AvailabilityMonitor
from fl_client.training.trainer import AnyAssignment
from fl_client.training.worker import Worker

GRACE_S, GRACE_SHARE, MAX_GRACE_S = 1.0, 0.1, 60.0
"""Added to a deadline, so that a coordinator can extend it in time: seconds, and a share of the deadline."""


def seconds_for(assignment: AnyAssignment, limit: float) -> float:
    """Seconds until an assignment is given up. `limit` where its deadline is missing, negative or beyond the limit."""
    if not assignment.HasField("deadline"):
        return limit
    seconds = seconds_of(assignment.deadline)
    if not 0.0 <= seconds <= limit:
        return limit
    return min(seconds + min(GRACE_S + GRACE_SHARE * seconds, MAX_GRACE_S), limit)


class DeadlineTimer:
    """`async with timer: ...` ends the block with WorkFailed when the time is over."""

    def __init__(self, seconds: float, *, running: bool) -> None:
        """running: whether the coordinator is attended now."""
        self._left, self._running = seconds, running
        self._ends: float | None = None
        self._scope: asyncio.Timeout | None = None

    def restart(self, seconds: float) -> None:
        """The assignment was repeated with this much time."""
        self._left, self._ends = seconds, None
        self._set()

    def set_running(self, running: bool) -> None:
        """Count time from now on, or stop counting."""
        self._running = running
        self._set()

    async def __aenter__(self) -> None:
        """Begin to limit the block."""
        scope = asyncio.timeout(None)
        await scope.__aenter__()
        self._scope = scope
        self._set()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises WorkFailed if the block was ended because its time was over."""
        scope, self._scope = self._scope, None
        assert scope is not None  # noqa: S101 - for the type: the block has been entered
        try:
            await scope.__aexit__(kind, error, trace)
        except TimeoutError:
            raise beyond_limits(
                "the deadline is over: expected an answer within the assignment's deadline and the owner's limit"
                " (limits.max_seconds), give it less work or more time"
            ) from None

    def _set(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._ends is not None and not self._running:
            self._left, self._ends = max(0.0, self._ends - now), None
        elif self._ends is None and self._running:
            self._ends = now + self._left
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(self._ends)


log = structlog.get_logger()

HANGS_S = 30.0
"""A step that goes on for so long after its cancellation or deadline hangs. Any other ends the work when it ends."""
CHECK_S = 5.0


async def watch(worker: Worker, availability: AvailabilityMonitor) -> None:
    """Report to the coordinator that the device may not train while a step hangs; until cancelled."""
    hangs = False
    while True:
        await asyncio.sleep(CHECK_S)
        seconds = worker.hangs_for()
        if (seconds >= HANGS_S) == hangs:
            continue
        hangs = not hangs
        if not hangs:
            log.info("training_goes_on")
            availability.set_training(None)
            continue
        at = f" at {place}" if (place := worker.place) else ""
        problem = f"a step has not ended {seconds:.0f} s after its work was cancelled{at}: restart the daemon"
        log.error("training_hangs", detail=problem)
        availability.set_training(problem)
