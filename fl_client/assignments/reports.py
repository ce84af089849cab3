"""What is sent of an assignment: its update until there is a receipt, or the report of its failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import islice
from typing import NamedTuple

import structlog

from fl_client.connection.link import Backoff, Link, Session
from fl_client.connection.messages import log_text
from fl_client.errors import WorkFailed
from fl_client.gates.availability import AvailabilityMonitor
from fl_client.policy.site import SitePolicy
from fl_client.storage.disk import DiskThread
from fl_client.storage.pending_updates import Key, PendingUpdate, message_of
from fl_common.rate_limits import RateLimiter
from protos.chunks import chunk_spans, encode_piece
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2

BLOCK_BYTES = 1 << 22
"""Bytes read from the disk at once, or one chunk if that is longer."""

MAX_CHUNKS = 1 << 16
"""Chunks of one update. A coordinator that requests smaller chunks gets larger ones."""


async def submit(link: Link, update: PendingUpdate, disk: DiskThread, policy: SitePolicy) -> training_pb2.Receipt:
    """Send an update until the coordinator has answered with a receipt, through as many sessions as needed.

    Raises:
        Refused, NotAllowed: the coordinator will never accept it.
        WorkFailed: the site's policy refuses the bytes.
    """
    upload = Upload(update, disk, Backoff(link.delays), policy)
    return await link.call_with_retry(upload.resume, upload.backoff)


class Upload:
    """One update in transfer."""

    def __init__(self, update: PendingUpdate, disk: DiskThread, backoff: Backoff, policy: SitePolicy) -> None:
        self.backoff = backoff
        self._update = update
        self._disk = disk
        self._policy = policy
        self._begun, self._kept = update.begun, 0
        self._furthest = 0
        """Most bytes that the coordinator ever had: bytes sent again are no progress."""

    async def resume(self, session: Session) -> training_pb2.Receipt:
        """Send the update, or the bytes that the coordinator does not have."""
        if self._begun and (receipt := await self._query(session)):
            return receipt
        self._begun = True
        self._policy.check_sending(self._update.header.size_bytes - self._kept)
        return await session.connection.submit(self._parts(session))

    async def _query(self, session: Session) -> training_pb2.Receipt | None:
        """The receipt, if there is one. Otherwise the offset to resume at is known afterwards."""
        header = self._update.header
        query = pb.QueryUploadRequest(session_id=session.id, key=header.key, digest=header.digest)
        state = await session.connection.call(query, pb.QueryUploadResponse)
        if state.HasField("receipt"):
            return state.receipt
        self._kept = min(state.kept_bytes, header.size_bytes)
        if self._kept > self._furthest:
            self._furthest = self._kept
            self.backoff.reset()
        return None

    async def _parts(self, session: Session) -> AsyncIterator[bytes]:
        """Serialized messages: header, missing chunks, trailer. Each is made when it is sent."""
        header = training_pb2.UpdateHeader()
        header.CopyFrom(self._update.header)
        header.session_id, header.resume_offset = session.id, self._kept
        yield pb.SubmitUpdateRequest(header=header).SerializeToString()
        chunk_bytes = min(max(session.chunk_bytes, -(-header.size_bytes // MAX_CHUNKS)), session.max_chunk_bytes)
        block_bytes = max(1, BLOCK_BYTES // chunk_bytes) * chunk_bytes
        for offset, length in chunk_spans(header.size_bytes, block_bytes, self._kept):
            block = memoryview(await self._disk.run(self._update.read, offset, length))
            for start, size in chunk_spans(length, chunk_bytes):
                yield encode_piece(block[start : start + size], offset + start)
                self._policy.sent(size)
        trailer = training_pb2.UpdateTrailer(size_bytes=header.size_bytes)
        yield pb.SubmitUpdateRequest(trailer=trailer).SerializeToString()


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
            request = pb.ReportStatusRequest(
                session_id=session.id, failures=[report.failure for report in sent.values()]
            )
            # With the availability where it ended the work, so that no run samples this device in between.
            availability = self._availability.availability
            stopped = any(report.failure.reason == pb.FAILURE_REASON_STOPPED for report in sent.values())
            if stopped or not availability.may_train:
                request.availability.CopyFrom(availability)
            await session.connection.call(request, pb.ReportStatusResponse)
            if request.HasField("availability"):
                self._availability.told(availability)

        try:
            await self._link.call_with_retry(report)
        except Exception as error:  # noqa: BLE001 - a fault here must not end a daemon that trains for other rounds too
            log.warning("failures_not_told", count=len(sent), reason=log_text(str(error)))
        for key, told in sent.items():
            if self._waiting.get(key) is told:
                del self._waiting[key]
