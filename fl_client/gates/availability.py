"""Whether this device may train: checks its gates, reports changes to the coordinator, and ends forbidden work."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import structlog

from fl_client.connection.link import Link, Session
from fl_client.errors import GivenUp, TransportError, WorkFailed
from fl_client.gates.gate_set import ClosedGate, GateSet
from fl_client.monitoring.metrics import Metrics
from fl_client.settings.config import GatesConfig
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

SPREAD_S = 2.0
"""Devices with the same hours report their beginning spread over this time."""
MAX_CHARS = 256
"""Longest detail that a coordinator accepts."""

Round = tuple[str, int]
"""The id of a run and the number of a round."""


class AvailabilityMonitor:
    """The state of the gates for the rest of the daemon. Lives on the event loop; gates are read on another thread."""

    def __init__(
        self, gates: GateSet, config: GatesConfig, metrics: Metrics, clock: Callable[[], float] = time.time
    ) -> None:
        """clock: Unix seconds."""
        self._gates = gates
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._closed: tuple[ClosedGate, ...] = ()
        self._state_dir: tuple[ClosedGate, ...] = ()
        """The state directory, while it cannot be used. It ends no work: a round in progress may still succeed."""
        self._budget: tuple[ClosedGate, ...] = ()
        """The site's budget of the day, once it is used up. It ends no work either: the work in progress is counted."""
        self._training: tuple[ClosedGate, ...] = ()
        """A training step that never ends, which keeps the thread that all work needs."""
        self._checking = asyncio.Lock()
        self._changed = asyncio.Event()
        self._reported: pb.Availability | None = None
        self._working: set[asyncio.Task[object]] = set()
        self._begun: Round | None = None
        self._update_metrics()

    @property
    def availability(self) -> pb.Availability:
        """The availability as the coordinator gets it."""
        return availability_of(self._all_closed)

    @property
    def _all_closed(self) -> tuple[ClosedGate, ...]:
        return self._closed + self._state_dir + self._budget + self._training

    def set_state_dir(self, problem: str | None) -> None:
        """Take no new work while the state directory cannot be used. problem: why; None: it can be used."""
        reason = pb.UNAVAILABLE_REASON_RESOURCES
        self._state_dir = () if problem is None else (ClosedGate("state_dir", reason, problem, None),)
        self._update_metrics()
        self._changed.set()

    def set_budget(self, closed: ClosedGate | None) -> None:
        """Take no new work while the site's budget of the day is used up. None: something is left of it."""
        budget = () if closed is None else (closed,)
        if budget != self._budget:
            self._budget = budget
            log.info("budget_used_up" if budget else "budget_of_a_new_day", detail=_details(budget))
            self._update_metrics()
            self._changed.set()

    def set_training(self, problem: str | None) -> None:
        """Take no work while a training step hangs, and end what waits for it. problem: why; None: it has ended."""
        reason = pb.UNAVAILABLE_REASON_RESOURCES
        self._training = () if problem is None else (ClosedGate("training", reason, problem, None),)
        self._update_metrics()
        self._changed.set()
        self._end_work_if_closed()

    # Checks of the gates.

    async def check(self) -> None:
        """Check the gates once."""
        if not self._gates.names:
            return
        async with self._checking:
            closed = await asyncio.to_thread(self._gates.check)
        if closed == self._closed:
            return
        before, self._closed = {closed_gate.gate for closed_gate in self._closed}, closed
        for closed_gate in closed:
            if closed_gate.gate not in before:
                log.info("gate_closed", gate=closed_gate.gate, detail=closed_gate.detail)
        for gate in before - {closed_gate.gate for closed_gate in closed}:
            log.info("gate_opened", gate=gate)
        self._update_metrics()
        self._changed.set()
        self._end_work_if_closed()

    def _end_work_if_closed(self) -> None:
        if self._ends_work:
            for task in self._working:
                task.cancel()

    async def run(self) -> None:
        """Check every `check_s`, and when a gate is known to change."""
        while self._gates.names:
            await asyncio.sleep(self._pause())
            await self.check()

    def _pause(self) -> float:
        next_change = self._gates.next_change
        left = self._config.check_s if next_change is None else next_change - self._clock()
        # A little after the change: it has happened then, and a fleet with the same hours does not report at once.
        return min(self._config.check_s, max(0.0, left) + random.uniform(0.01, SPREAD_S))  # noqa: S311 - no secret

    def _update_metrics(self) -> None:
        closed = {closed_gate.gate for closed_gate in self._closed}
        self._metrics.may_train.set(not self._all_closed)
        self._metrics.state_dir_usable.set(not self._state_dir)
        for gate in self._gates.names:
            self._metrics.gate_closed.labels(gate).set(gate in closed)

    # Reports to the coordinator.

    def availability_for_registration(self) -> pb.Availability:
        """The availability for a registration, which counts as reported."""
        self._reported = self.availability
        return self._reported

    def told(self, availability: pb.Availability) -> None:
        """A report of failures has told it, perhaps after the report of a newer one, which is told again then."""
        self._reported = availability
        if availability != self.availability:
            self._changed.set()

    async def report_changes(self, link: Link) -> None:
        """Report every change as soon as the coordinator can be reached, unless a registration has done so."""

        async def report(session: Session) -> None:
            availability = self.availability
            request = pb.ReportStatusRequest(session_id=session.id, availability=availability)
            await session.connection.call(request, pb.ReportStatusResponse)
            self._reported = availability

        while True:
            await self._changed.wait()
            await link.session()
            self._changed.clear()
            if self._reported == self.availability:
                continue  # a registration came first
            try:
                await link.call_with_retry(report)
            except TransportError as error:
                log.warning("availability_not_told", reason=str(error))
                if isinstance(error, GivenUp):
                    self._changed.set()

    # Work that needs open gates.

    @asynccontextmanager
    async def while_allowed(self, round_: Round | None = None) -> AsyncIterator[None]:
        """Run work that needs open gates. It is ended when a gate closes that is not in `gates.finish`.

        round_: of training. A round that has begun may be finished, its later exchanges too.

        Raises:
            WorkFailed: a gate is closed, or closed meanwhile.
        """
        if self._all_closed and (self._ends_work or round_ is None or round_ != self._begun):
            raise self._failure()
        self._begun = round_ or self._begun
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type: a coroutine runs in a task
        cancelled_before = task.cancelling()
        self._working.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # `check` cancelled the task, unless another cancellation came too.
            if self._ends_work and task.uncancel() <= cancelled_before:
                raise self._failure() from None
            raise
        finally:
            self._working.discard(task)

    @property
    def _ends_work(self) -> bool:
        return bool(self._training) or any(closed_gate.gate not in self._config.finish for closed_gate in self._closed)

    def _failure(self) -> WorkFailed:
        who = "the owner's gates are closed" if self._closed else "this device takes no work now"
        return WorkFailed(pb.FAILURE_REASON_STOPPED, f"{who}: {_details(self._all_closed)}")


def availability_of(closed: Sequence[ClosedGate]) -> pb.Availability:
    """The availability: the first gate's reason, all details, and the time it ends if every gate knows it."""
    if not closed:
        return pb.Availability(may_train=True)
    availability = pb.Availability(may_train=False, reason=closed[0].reason, detail=_details(closed)[:MAX_CHARS])
    untils = [closed_gate.until for closed_gate in closed if closed_gate.until is not None]
    if len(untils) == len(closed):
        availability.until.FromSeconds(round(max(untils)))
    return availability


def _details(closed: Sequence[ClosedGate]) -> str:
    return "; ".join(f"{closed_gate.gate}: {closed_gate.detail}" for closed_gate in closed)
