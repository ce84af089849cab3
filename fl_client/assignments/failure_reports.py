"""Reports of failed assignments: one call carries many of them, and a limited number waits."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import NamedTuple

import structlog

from fl_client.assignments.availability import AvailabilityMonitor
from fl_client.connection.link import Link, Session
from fl_client.connection.messages import log_text
from fl_client.errors import WorkFailed
from fl_client.storage.pending_updates import Key, message_of
from fl_common.rate_limits import RateLimiter
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

MAX_WAITING = 256
"""Failures that wait to be reported. Beyond it the oldest are dropped."""
MAX_PER_CALL = 64
"""Failures that a coordinator accepts in one call."""
CALLS_PER_S, CALL_BURST = 5.0, 20
"""Limit of calls."""
MESSAGE_CHARS = 1000
"""Length to which a failure's message is cut. The coordinator keeps no more."""

TYPE_CHARS, PLACE_CHARS = 100, 200
"""The same for the type and the place of an error."""


class _Report(NamedTuple):
    work_digest: bytes
    failure: pb.WorkFailure


class FailureReports:
    """Failures that the coordinator does not know yet, by their key, the oldest first."""

    def __init__(self, link: Link, availability: AvailabilityMonitor) -> None:
        self._link, self._availability = link, availability
        self._waiting: dict[Key, _Report] = {}
        self._added = asyncio.Event()
        self._limiter = RateLimiter(CALLS_PER_S, CALL_BURST)

    def add(self, key: Key, work_digest: bytes, failed: WorkFailed) -> None:
        """Report a failure as soon as the coordinator can be reached. work_digest: see `work_digest`."""
        failure = pb.WorkFailure(
            key=message_of(key), reason=failed.reason, message=log_text(str(failed), MESSAGE_CHARS)[:MESSAGE_CHARS]
        )
        if failed.raised is not None:
            failure.error_type = log_text(failed.raised.error_type, TYPE_CHARS)[:TYPE_CHARS]
            failure.place = log_text(failed.raised.place, PLACE_CHARS)[:PLACE_CHARS]
        self._waiting.pop(key, None)
        self._waiting[key] = _Report(work_digest, failure)
        if len(self._waiting) > MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]
        self._added.set()

    def is_waiting(self, key: Key, work_digest: bytes) -> bool:
        """Whether the failure of exactly this work is not reported yet."""
        return (report := self._waiting.get(key)) is not None and report.work_digest == work_digest

    def remove(self, key: Key) -> None:
        """Remove a report: other work has begun under its key."""
        self._waiting.pop(key, None)

    async def run(self) -> None:
        """Send reports until cancelled."""
        while True:
            await self._added.wait()
            self._added.clear()
            while self._waiting:
                await asyncio.sleep(self._limiter.delay())
                await self._send()

    async def _send(self) -> None:
        sent: dict[Key, _Report] = {}

        async def report(session: Session) -> None:
            sent.clear()
            sent.update(islice(self._waiting.items(), MAX_PER_CALL))
            if not sent:
                return
            request = pb.ReportStatusRequest(session_id=session.id, failures=[each.failure for each in sent.values()])
            # With the availability where it ended the work, so that no run samples this device in between.
            availability = self._availability.availability
            stopped = any(each.failure.reason == pb.FAILURE_REASON_STOPPED for each in sent.values())
            if stopped or not availability.may_train:
                request.availability.CopyFrom(availability)
            await session.connection.report_status(request)

        try:
            await self._link.call_with_retry(report)
        except Exception as error:  # noqa: BLE001 - a fault here must not end a daemon that trains for other rounds too
            log.warning("failures_not_told", count=len(sent), reason=log_text(str(error)))
        for key, each in sent.items():
            if self._waiting.get(key) is each:
                del self._waiting[key]
