"""Receives updates: header, chunks, trailer. An update counts whole or not at all.

The header is checked before any tensor bytes are accepted. Each chunk is written once, at its final place. At the
trailer the whole file is checked, moved into the spool and entered in the ledger; only then is it acknowledged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import structlog

from fl_server.admission.client_rules import UpdateRefused, WrongDigest
from fl_server.admission.gate import AdmissionGate
from fl_server.admission.masked import MaskedGate
from fl_server.clients.sessions import Transfer
from fl_server.clients.transfer_limits import Excess
from fl_server.errors import Forbidden, NotNow, UploadBroken
from fl_server.run.run import Run
from fl_server.services import Services
from fl_server.store.errors import StoreError, StoreFull
from fl_server.store.spool.part_file import PartFile
from fl_server.store.spool.spool import PartBusy, SpoolKey, TooManyUnfinished
from fl_server.uploads.stream import ChunkStream, ReadSlots, Request, Requests, trailer_of
from fl_server.uploads.verdicts import Submission, Verdicts
from protos.chunks import ChunkError, ReadChunk, check_chunk
from protos.codec import digest_bytes
from protos.fl.v1.training_pb2 import ExchangeKey, Receipt, UpdateHeader, UpdateTrailer
from protos.wire import MAX_CHUNK_BYTES

log = structlog.get_logger()

P = ParamSpec("P")
R = TypeVar("R")

BUSY_WAIT_S = 1.0
"""Retry wait of a client that has an older stream of the same update open: that stream may be dead, unnoticed yet."""


@dataclass(frozen=True, slots=True)
class _Upload:
    """One open stream."""

    submission: Submission
    gate: AdmissionGate | MaskedGate
    part: PartFile

    @property
    def header(self) -> UpdateHeader:
        return self.submission.header

    @property
    def client(self) -> str:
        return self.submission.client

    def broken(self, why: str) -> UploadBroken:
        """The error for a stream that must start again at the bytes kept."""
        return UploadBroken(self.header.key, self.part.kept_bytes, why)


class UploadReceiver:
    """Receives the updates of all runs."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._verdicts = Verdicts(services)
        self._wrong_digests: dict[str, bytes] = {}
        """Each client's latest work with an update of a wrong digest. One per client, so that memory is bounded."""
        self._transfer_limits = services.fleet.transfer_limits
        self._slots = ReadSlots()
        self.in_flight = 0
        """Open streams."""

    async def submit(self, run: Run, header: UpdateHeader, transfer: Transfer, requests: Requests) -> Receipt:
        """Receive one upload behind its header; returns the receipt. Raises the error that ended the transfer."""
        submission = Submission(run, header, transfer.client_id)
        if (first := await self._verdicts.repeated(submission)) is not None:
            return first
        try:
            submission.check_wanted()
            gate = run.submissions.gate(transfer.client_id)
            gate.check_header(header)
        except UpdateRefused as refusal:
            return await self._verdicts.refuse(submission, refusal)
        self.in_flight += 1
        try:
            return await self._receive(submission, gate, transfer, requests)
        except StoreFull as error:
            run.run_status.upload_failed(str(error))
            raise
        except StoreError as error:
            return await self._verdicts.refuse(submission, _late(submission, error))
        finally:
            self.in_flight -= 1

    async def receipt(self, run: Run, key: ExchangeKey, client: str) -> Receipt | None:
        """The receipt of the first verdict on the client's update for the key; None if there is none."""
        return await self._verdicts.receipt(run, key, client)

    async def kept_bytes(self, key: ExchangeKey, client: str, digest: bytes) -> int:
        """The offset at which an upload with that digest continues."""
        return await self._services.in_reads(self._services.spool.kept, _spool_key(key, client), digest)

    async def _receive(
        self, submission: Submission, gate: AdmissionGate | MaskedGate, transfer: Transfer, requests: Requests
    ) -> Receipt:
        header, part = submission.header, await self._open(submission)
        upload = _Upload(submission, gate, part)
        gauge = self._services.metrics.uploads_in_flight
        gauge.inc(header.size_bytes)
        try:
            trailer = await transfer.unless_ended(self._write_chunks(upload, requests))
            if trailer.size_bytes != header.size_bytes or part.kept_bytes != header.size_bytes:
                raise upload.broken(f"the upload ended short of {header.size_bytes} bytes")
            return await self._finish(upload)
        except (UpdateRefused, StoreError) as error:
            refusal = error if isinstance(error, UpdateRefused) else _late(submission, error)
            first = await self.receipt(submission.run, header.key, submission.client)
            if first is None or not first.admitted or first.digest != header.digest:
                await self._services.in_io(part.discard)
            # else an older stream of the same update was admitted, and the file is the admitted one
            transfer.check()
            return first or await self._verdicts.refuse(submission, refusal)
        except Forbidden:
            await self._services.in_io(part.discard)
            raise
        finally:
            gauge.dec(header.size_bytes)
            await self._close(part)

    async def _open(self, submission: Submission) -> PartFile:
        """The part file. Raises UploadBroken if the sender starts behind the bytes kept, NotNow if it is in use."""
        header, client = submission.header, submission.client
        digest, key = digest_bytes(header.digest), _spool_key(header.key, client)
        opening = asyncio.ensure_future(
            self._in_io(client, self._services.spool.open_part, key, digest, header.size_bytes)
        )
        try:
            part = await asyncio.shield(opening)
        except PartBusy as busy:
            raise NotNow("an older stream of this update is still open", BUSY_WAIT_S) from busy
        except TooManyUnfinished as held:
            limits = self._services.config.transfers
            most = f"{limits.kept_files} unfinished uploads of {limits.kept_mib} MiB (transfers.kept_files, kept_mib)"
            raise self._transfer_limits.exceeded(client, Excess("kept", most, BUSY_WAIT_S)) from held
        except asyncio.CancelledError:
            # The thread opens the file anyway. Left open, it would block every later writer.
            opening.add_done_callback(_close_unused)
            raise
        if header.resume_offset > part.kept_bytes:
            kept = part.kept_bytes
            await self._close(part)
            raise UploadBroken(header.key, kept, f"expected a start at {kept} or before, got {header.resume_offset}")
        if header.resume_offset:
            self._services.metrics.uploads_resumed.inc()
            write = submission.run.context.cohort_log.info
            write("upload_resumed", run=header.key.run_id, client=client, offset=header.resume_offset)
        return part

    async def _close(self, part: PartFile) -> None:
        """Close a part file, also when the stream is cut meanwhile: left open, it would block every later writer."""
        if not part.closed:
            await asyncio.shield(self._services.in_io(part.close))

    async def _write_chunks(self, upload: _Upload, requests: Requests) -> UpdateTrailer:
        """Write chunks until the trailer. Raises UploadBroken, NotNow, UpdateRefused."""
        offset = upload.header.resume_offset
        rounds, size = upload.submission.run.rounds, upload.header.size_bytes
        rounds.bytes.upload_started(upload.client, offset)
        stream = ChunkStream(requests, size, self._services.config.limits)
        caller = self._transfer_limits.of(upload.client)
        with rounds.transfers.transfer(upload.client, "up", size, offset) as shown:
            while True:
                async with self._slots.turn() as turn:
                    request = await _next(stream, upload)
                    turn.received()
                    # The client may be banned by now, or have a newer session.
                    self._services.fleet.sessions.of_call(upload.header.session_id)
                    if (trailer := trailer_of(request)) is not None:
                        return trailer
                    chunk = stream.chunk(request)
                    await self._write(upload, chunk, offset)
                    count = len(chunk.data)
                    del request, chunk  # their memory is free before the next one comes
                offset += count
                shown.done = offset
                await caller.pace(count)
                upload.submission.check_wanted()

    async def _write(self, upload: _Upload, chunk: ReadChunk, offset: int) -> None:
        """Write a chunk, and count it once it is written, also when the stream is cut while a thread writes it."""

        def count(writing: asyncio.Future[None]) -> None:
            if not writing.cancelled() and writing.exception() is None:
                self._services.metrics.bytes.labels("up", "update").inc(len(chunk.data))
                upload.submission.run.rounds.bytes.total_up += len(chunk.data)

        writing = asyncio.ensure_future(self._in_io(upload.client, _write_chunk, upload, chunk, offset))
        writing.add_done_callback(count)
        await asyncio.shield(writing)

    async def _finish(self, upload: _Upload) -> Receipt:
        """Check the whole file, seal it, and admit the update. Raises UpdateRefused, UploadBroken."""
        digest = digest_bytes(upload.header.digest)
        try:
            steps = upload.header.num_steps
            norms = await self._in_io(upload.client, upload.gate.check_file, upload.part.path, digest, steps)
        except WrongDigest:
            # The first time it may be a prefix torn by a restart, which a new upload repairs; then it is the client.
            work = upload.header.key.SerializeToString(deterministic=True)
            if self._wrong_digests.pop(upload.client, None) == work:
                raise
            self._wrong_digests[upload.client] = work
            await self._services.in_io(upload.part.discard)
            raise UploadBroken(upload.header.key, 0, "the bytes have not the digest of the header") from None
        upload.submission.check_wanted()
        # Not in the threads of `seal`: a slow object store would hold up all other uploads.
        await asyncio.gather(*map(asyncio.wrap_future, upload.part.sending), return_exceptions=True)
        await self._services.in_io(upload.part.seal)
        upload.submission.run.rounds.bytes.upload_completed(upload.client)
        clip_factor = upload.gate.clip_factor(next(iter(norms.values())))
        receipt = await self._verdicts.admit(upload.submission, norms, clip_factor)
        upload.submission.run.run_status.upload_stored()
        return receipt

    async def _in_io(self, client: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run work on an upload's file in the client's share of the I/O threads."""
        async with self._transfer_limits.of(client).share:
            return await self._services.in_io(function, *args, **kwargs)


def _late(submission: Submission, error: StoreError) -> UpdateRefused:
    """The refusal of an update whose round was closed: its files are removed, also under an open upload.

    Raises the error if the update is still wanted.
    """
    try:
        submission.check_wanted()
    except UpdateRefused as refusal:
        return refusal
    raise error


async def _next(stream: ChunkStream, upload: _Upload) -> Request:
    try:
        return await stream.next()
    except TimeoutError:
        raise NotNow(f"{stream.timeout}; what came is kept", BUSY_WAIT_S) from None
    except StopAsyncIteration:
        raise upload.broken("the stream ended before the trailer") from None


def _write_chunk(upload: _Upload, chunk: ReadChunk, offset: int) -> None:
    """Check a chunk and write it at its place; in a worker thread."""
    try:
        check_chunk(chunk, offset, MAX_CHUNK_BYTES, upload.header.size_bytes)
        upload.part.write(chunk.offset, chunk.data, chunk.crc32c)
    except (ChunkError, ValueError) as error:
        raise upload.broken(str(error)) from error


def _close_unused(opening: asyncio.Future[PartFile]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _spool_key(key: ExchangeKey, client: str) -> SpoolKey:
    return SpoolKey(key.run_id, key.round, key.exchange, client)
