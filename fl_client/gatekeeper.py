"""Whether this device may train: looks at its gates now and then, and tells the coordinator and the work under way."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import structlog

from fl_client.config import GatesConfig
from fl_client.errors import TransportError, WorkFailed
from fl_client.gates.panel import Closed, Panel
from fl_client.link import Link, Session
from fl_client.metrics import Metrics
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

SPREAD_S = 2.0
"""Within which devices with the same hours say that these have begun."""
MAX_CHARS = 256
"""Of the detail that a coordinator takes."""

Round = tuple[str, int]
"""(run, round)."""


class Gatekeeper:
    """What the panel says, as the rest of the daemon sees it. Lives on the event loop; looks on a thread beside it."""

    def __init__(
        self, panel: Panel, config: GatesConfig, metrics: Metrics, clock: Callable[[], float] = time.time
    ) -> None:
        """clock: Unix seconds."""
        self._panel = panel
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._closed: tuple[Closed, ...] = ()
        self._changed = asyncio.Event()
        self._told: pb.Availability | None = None
        self._at_work: set[asyncio.Task[object]] = set()
        self._begun: Round | None = None
        self._show()

    @property
    def availability(self) -> pb.Availability:
        """What the coordinator is told."""
        return availability_of(self._closed)

    # Looking.

    async def look(self) -> None:
        """Look at the gates once."""
        if not self._panel.gates:
            return
        closed = await asyncio.to_thread(self._panel.look)
        if closed == self._closed:
            return
        before, self._closed = {each.gate for each in self._closed}, closed
        for each in closed:
            if each.gate not in before:
                log.info("gate_closed", gate=each.gate, detail=each.detail)
        for gate in before - {each.gate for each in closed}:
            log.info("gate_opened", gate=gate)
        self._show()
        self._changed.set()
        if self._ends_work:
            for task in self._at_work:
                task.cancel()

    async def watch(self) -> None:
        """Look again and again: every `check_s`, and when a gate is known to change."""
        while self._panel.gates:
            await asyncio.sleep(self._pause())
            await self.look()

    def _pause(self) -> float:
        changes_at = self._panel.changes_at
        left = self._config.check_s if changes_at is None else changes_at - self._clock()
        # A little behind the change: it has happened then, and a fleet with the same hours does not come at once.
        return min(self._config.check_s, max(0.0, left) + random.uniform(0.01, SPREAD_S))  # noqa: S311 - no secret

    def _show(self) -> None:
        closed = {each.gate for each in self._closed}
        self._metrics.may_train.set(not closed)
        for gate in self._panel.gates:
            self._metrics.gate_closed.labels(gate).set(gate in closed)

    # Telling.

    def introduce(self) -> pb.Availability:
        """What a registration says."""
        self._told = self.availability
        return self._told

    async def tell(self, link: Link) -> None:
        """Tell the coordinator of every change, as soon as it can be reached; registrations say it by themselves."""

        async def report(session: Session) -> None:
            said = self.availability
            await session.connection.report_status(pb.ReportStatusRequest(session_id=session.id, availability=said))
            self._told = said

        while True:
            await self._changed.wait()
            await link.session()
            self._changed.clear()
            if self._told == self.availability:
                continue  # a registration was quicker
            try:
                await link.patiently(report)
            except TransportError as error:
                log.warning("availability_not_told", reason=str(error))

    # Work.

    @asynccontextmanager
    async def at_work(self, round_: Round | None = None) -> AsyncIterator[None]:
        """Work that needs open gates; it is ended when one closes that no work is finished behind.

        round_: of training. A round that was begun is finished, its later exchanges too.

        Raises:
            WorkFailed: a gate is closed, or closed meanwhile.
        """
        if self._closed and (self._ends_work or round_ is None or round_ != self._begun):
            raise self._failure()
        self._begun = round_ or self._begun
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - for the type: a coroutine runs in a task
        cancelled_before = task.cancelling()
        self._at_work.add(task)
        try:
            yield
        except asyncio.CancelledError:
            # Ours, unless somebody else wanted it too.
            if self._ends_work and task.uncancel() <= cancelled_before:
                raise self._failure() from None
            raise
        finally:
            self._at_work.discard(task)

    @property
    def _ends_work(self) -> bool:
        return any(each.gate not in self._config.finish for each in self._closed)

    def _failure(self) -> WorkFailed:
        return WorkFailed(pb.FAILURE_REASON_STOPPED, f"the owner's gates are closed: {_words(self._closed)}")


def availability_of(closed: Sequence[Closed]) -> pb.Availability:
    """What a coordinator is told: the first gate's reason, all their words, and until when if all of them know."""
    if not closed:
        return pb.Availability(may_train=True)
    availability = pb.Availability(may_train=False, reason=closed[0].reason, detail=_words(closed)[:MAX_CHARS])
    untils = [each.until for each in closed if each.until is not None]
    if len(untils) == len(closed):
        availability.until.FromSeconds(round(max(untils)))
    return availability


def _words(closed: Sequence[Closed]) -> str:
    return "; ".join(f"{each.gate}: {each.detail}" for each in closed)
