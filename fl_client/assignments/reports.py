"""Failures on their way to the coordinator: one call at a time carries many of them, and no more than so many wait."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import NamedTuple

import structlog

from fl_client.connection.pace import Pace
from fl_client.connection.reading import text
from fl_client.gatekeeper import Gatekeeper
from fl_client.link import Link, Session
from fl_client.updates import Key, message_of
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

WAITING = 256
"""Failures that wait to be told at most; of more, the oldest are dropped."""
IN_A_CALL = 64
"""As many as a coordinator takes."""
CALLS_PER_S, CALLS_AT_ONCE = 5.0, 20
"""In the long run, and at once."""
MESSAGE_CHARS = 1000
"""Length to which a failure's message is cut; the coordinator keeps no more."""


class _Report(NamedTuple):
    work: bytes
    failure: pb.WorkFailure


class Reports:
    """Failures by their key, the oldest first."""

    def __init__(self, link: Link, gatekeeper: Gatekeeper) -> None:
        self._link, self._gatekeeper = link, gatekeeper
        self._waiting: dict[Key, _Report] = {}
        self._came = asyncio.Event()
        self._pace = Pace(CALLS_PER_S, CALLS_AT_ONCE)

    def add(self, key: Key, work: bytes, reason: pb.FailureReason, message: str) -> None:
        """Tell the coordinator as soon as it can be reached. work: what failed, as `work_of` names it."""
        failure = pb.WorkFailure(
            key=message_of(key), reason=reason, message=text(message, MESSAGE_CHARS)[:MESSAGE_CHARS]
        )
        self._waiting.pop(key, None)
        self._waiting[key] = _Report(work, failure)
        if len(self._waiting) > WAITING:
            del self._waiting[next(iter(self._waiting))]
        self._came.set()

    def holds(self, key: Key, work: bytes) -> bool:
        """Whether the coordinator is yet to be told that this very work has failed."""
        return (report := self._waiting.get(key)) is not None and report.work == work

    def forget(self, key: Key) -> None:
        """Other work is done under the key now."""
        self._waiting.pop(key, None)

    async def send(self) -> None:
        """Send what comes, for ever."""
        while True:
            await self._came.wait()
            self._came.clear()
            while self._waiting:
                await asyncio.sleep(self._pace.delay())
                await self._send_some()

    async def _send_some(self) -> None:
        told: dict[Key, _Report] = {}

        async def report(session: Session) -> None:
            told.clear()
            told.update(islice(self._waiting.items(), IN_A_CALL))
            if not told:
                return
            request = pb.ReportStatusRequest(session_id=session.id, failures=[each.failure for each in told.values()])
            # What the owner stopped is told with the state of the gates: so no run draws this device in between.
            if any(each.failure.reason == pb.FAILURE_REASON_STOPPED for each in told.values()):
                request.availability.CopyFrom(self._gatekeeper.availability)
            await session.connection.report_status(request)

        try:
            await self._link.patiently(report)
        except Exception as error:  # noqa: BLE001 - a fault here must not end a daemon that trains for other rounds too
            log.warning("failures_not_told", count=len(told), reason=text(str(error)))
        for key, each in told.items():
            if self._waiting.get(key) is each:
                del self._waiting[key]
