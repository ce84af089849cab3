"""Submission of an update: resumed where the coordinator has it, and retried until there is a receipt."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fl_client.connection.link import Backoff, Link, Session
from fl_client.policy.site import SitePolicy
from fl_client.storage.disk import DiskThread
from fl_client.storage.pending_updates import PendingUpdate
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
        state = await session.connection.query_upload(query)
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
