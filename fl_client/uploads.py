"""Sending an update: from where the coordinator has it, again and again until there is a receipt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from fl_client.disk import Disk
from fl_client.link import Backoff, Link, Session
from fl_client.updates import Outgoing
from protos.chunks import chunk_spans, encode_piece
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2

BLOCK_BYTES = 1 << 22
"""Read from the disk at once, or one chunk if that is longer."""

MOST_CHUNKS = 1 << 16
"""Of one update: a coordinator that asks for smaller chunks gets larger ones."""


async def submit(link: Link, update: Outgoing, disk: Disk, on_bytes: Callable[[int], None]) -> training_pb2.Receipt:
    """Send an update until the coordinator has given its word on it, through as many sessions as that takes.

    Raises:
        Refused, NotAllowed: the coordinator will not take it, whatever is tried.
    """
    upload = Upload(update, disk, Backoff(link.waits), on_bytes)
    return await link.patiently(upload.go_on, upload.backoff)


class Upload:
    """One update on its way up."""

    def __init__(self, update: Outgoing, disk: Disk, backoff: Backoff, on_bytes: Callable[[int], None]) -> None:
        self.backoff = backoff
        self._update = update
        self._disk = disk
        self._on_bytes = on_bytes
        self._begun, self._kept = update.begun, 0
        self._furthest = 0
        """The most that the coordinator ever had: going back and forth is no progress."""

    async def go_on(self, session: Session) -> training_pb2.Receipt:
        """Send it, or the rest of what was begun before."""
        if self._begun and (receipt := await self._ask(session)):
            return receipt
        self._begun = True
        return await session.connection.submit(self._parts(session))

    async def _ask(self, session: Session) -> training_pb2.Receipt | None:
        """The coordinator's word, if it was given; else it is known now where to go on."""
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
        """Serialized messages: header, the chunks that are missing, trailer. They are made when they are sent."""
        header = training_pb2.UpdateHeader()
        header.CopyFrom(self._update.header)
        header.session_id, header.resume_offset = session.id, self._kept
        yield pb.SubmitUpdateRequest(header=header).SerializeToString()
        chunk_bytes = min(max(session.chunk_bytes, -(-header.size_bytes // MOST_CHUNKS)), session.max_chunk_bytes)
        block_bytes = max(1, BLOCK_BYTES // chunk_bytes) * chunk_bytes
        for offset, length in chunk_spans(header.size_bytes, block_bytes, self._kept):
            block = memoryview(await self._disk.run(self._update.read, offset, length))
            for start, size in chunk_spans(length, chunk_bytes):
                yield encode_piece(block[start : start + size], offset + start)
                self._on_bytes(size)
        trailer = training_pb2.UpdateTrailer(size_bytes=header.size_bytes)
        yield pb.SubmitUpdateRequest(trailer=trailer).SerializeToString()
