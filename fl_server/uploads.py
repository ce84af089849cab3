"""The way of an update from the wire to the ledger: header, chunks, trailer; whole or not at all.

The header is judged before a byte of tensors is taken. Each chunk is written once, where it belongs. At the trailer
the whole is checked, moved into the spool and entered in the ledger; only then is it acknowledged. The first word on
a (run, round, exchange, client) stands: a repeat gets it again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import structlog

from fl_server.admission import Gate, Refused, WrongDigest
from fl_server.clients.allowance import Excess
from fl_server.errors import Forbidden, NotNow, UploadBroken
from fl_server.parts import Parts
from fl_server.patience import Patience
from fl_server.run import Run
from fl_server.spool import PartBusy, PartsHeld, SpoolKey
from fl_server.spool_parts import PartFile
from fl_server.store.base import UpdateRecord
from fl_server.transfers import Transfer
from fl_server.upload_parts import Chunks, Request, Requests
from protos.chunks import ChunkError, ReadChunk, check_chunk
from protos.codec import digest_bytes, digest_message
from protos.fl.v1.training_pb2 import ExchangeKey, Receipt, RefusalReason, UpdateHeader, UpdateTrailer
from protos.wire import MAX_CHUNK_BYTES

log = structlog.get_logger()
P = ParamSpec("P")
R = TypeVar("R")

BUSY_WAIT_S = 1.0
"""How long a client waits when an older stream for the same update has not been noticed to be dead."""


@dataclass(frozen=True, slots=True)
class _Upload:
    """One stream that is being taken."""

    run: Run
    header: UpdateHeader
    client: str
    gate: Gate
    part: PartFile

    @property
    def key(self) -> ExchangeKey:
        return self.header.key


class Uploads:
    """Takes the updates of all runs."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._digest_faults: dict[str, bytes] = {}
        """By client: the latest work of which an update had not its digest. One for each, or liars would fill it."""
        self._transfer_limits = parts.fleet.transfer_limits
        self.in_flight = 0
        """Streams that are being taken now."""

    async def submit(self, run: Run, header: UpdateHeader, transfer: Transfer, requests: Requests) -> Receipt:
        """Take one upload whose header came; returns what is to be answered. Raises what the transfer is ended with."""
        client = transfer.client_id
        first = None if run.intake.unheard(header.key, client) else await self.receipt(run, header.key, client)
        if first is not None:
            self._count_conflict(run, header, client, first)
            return first
        reason = run.intake.refusal_of(header, client)
        if reason is not None:
            return await self._not_taken(run, header, client, reason)
        gate = run.intake.gate(client)
        try:
            gate.check_header(header)
        except Refused as refusal:
            return await self._refuse(run, header, client, refusal)
        self.in_flight += 1
        try:
            return await self._take(run, header, transfer, requests)
        finally:
            self.in_flight -= 1

    async def receipt(self, run: Run, key: ExchangeKey, client: str) -> Receipt | None:
        """The first word on this client's update for the key, if it was said."""
        if key.round > run.state.round or key.exchange >= len(run.behaviour.algorithm.exchanges):
            return None  # nobody was ever asked for it, and the number may be none that a ledger holds
        store = self._parts.ledger.store
        known = await self._parts.ledger.do(store.update_of, run.id, key.round, key.exchange, client)
        return None if known is None else _receipt(key, known)

    async def kept_bytes(self, key: ExchangeKey, client: str, digest: bytes) -> int:
        """Where an upload of that digest goes on."""
        return await self._parts.in_reads(self._parts.spool.kept, _spool_key(key, client), digest)

    async def _in_io(self, client: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run something that touches an upload's file, in the client's share of the threads."""
        return await self._transfer_limits.of(client).in_share(lambda: self._parts.in_io(function, *args, **kwargs))

    async def _take(self, run: Run, header: UpdateHeader, transfer: Transfer, requests: Requests) -> Receipt:
        client = transfer.client_id
        gate = run.intake.gate(client)
        part = await self._open(header, client)
        upload = _Upload(run, header, client, gate, part)
        gauge = self._parts.metrics.uploads_in_flight
        gauge.inc(header.size_bytes)
        try:
            trailer = await transfer.unless_ended(self._receive(upload, requests))
            if trailer.size_bytes != header.size_bytes or part.kept_bytes != header.size_bytes:
                raise UploadBroken(header.key, part.kept_bytes, f"the upload ended short of {header.size_bytes} bytes")
            return await self._finish(upload)
        except Refused as refusal:
            first = await self.receipt(run, header.key, client)
            if first is None or not first.admitted or first.digest != header.digest:
                await self._parts.in_io(part.discard)
            # else an older stream of the update was faster, and the file is what its word is about
            transfer.check()
            return first or await self._refuse(run, header, client, refusal)
        except Forbidden:
            await self._parts.in_io(part.discard)
            raise
        finally:
            gauge.dec(header.size_bytes)
            await self._let_go(part)

    async def _open(self, header: UpdateHeader, client: str) -> PartFile:
        """The part file; it must have what the sender believes to be there."""
        digest = digest_bytes(header.digest)
        opening = asyncio.ensure_future(
            self._in_io(client, self._parts.spool.open_part, _spool_key(header.key, client), digest, header.size_bytes)
        )
        try:
            part = await asyncio.shield(opening)
        except PartBusy as busy:
            raise NotNow("an older stream of this update is still open", BUSY_WAIT_S) from busy
        except PartsHeld as held:
            limits = self._parts.config.transfers
            most = f"{limits.kept_files} unfinished uploads of {limits.kept_mib} MiB (transfers.kept_files, kept_mib)"
            raise self._transfer_limits.exceeded(client, Excess("kept", most, BUSY_WAIT_S)) from held
        except asyncio.CancelledError:
            # The thread opens it all the same; left open it would be a writer that never ends.
            opening.add_done_callback(_close_unused)
            raise
        if header.resume_offset > part.kept_bytes:
            kept = part.kept_bytes
            await self._let_go(part)
            raise UploadBroken(header.key, kept, f"expected a start at {kept} or before, got {header.resume_offset}")
        if header.resume_offset:
            self._parts.metrics.uploads_resumed.inc()
            log.info("upload_resumed", run=header.key.run_id, client=client, offset=header.resume_offset)
        return part

    async def _let_go(self, part: PartFile) -> None:
        """Close a part file, also when the stream is cut in between: left open it would be a writer that never ends."""
        if not part.closed:
            await asyncio.shield(self._parts.in_io(part.close))

    async def _receive(self, upload: _Upload, requests: Requests) -> UpdateTrailer:
        """Write chunks until the trailer. Raises UploadBroken, NotNow, Refused."""
        offset = upload.header.resume_offset
        upload.run.log.sends(upload.client, offset)
        patience = Patience(self._parts.config.limits)
        caller, chunks = self._transfer_limits.of(upload.client), Chunks(upload.header.size_bytes)
        while True:
            request = await _next(requests, upload, patience)
            self._parts.fleet.session(upload.header.session_id)  # it may be banned by now, or here in a newer one
            if not isinstance(request, ReadChunk) and request.HasField("trailer"):
                return request.trailer
            chunk = chunks.next(request)
            await self._keep(upload, chunk, offset)
            offset += len(chunk.data)
            patience.came(len(chunk.data))
            await caller.pace(len(chunk.data))
            reason = upload.run.intake.refusal_of(upload.header, upload.client)
            if reason is not None:
                raise Refused(reason, _WORDS[reason])

    async def _keep(self, upload: _Upload, chunk: ReadChunk, offset: int) -> None:
        """Write a chunk, and count it if it was written: also when the stream is cut while a thread writes it."""

        def count(writing: asyncio.Future[None]) -> None:
            if not writing.cancelled() and writing.exception() is None:
                self._parts.metrics.bytes.labels("up", "update").inc(len(chunk.data))
                upload.run.log.bytes_up += len(chunk.data)

        writing = asyncio.ensure_future(self._in_io(upload.client, _write, upload, chunk, offset))
        writing.add_done_callback(count)
        await asyncio.shield(writing)

    async def _finish(self, upload: _Upload) -> Receipt:
        """Check the whole, seal it, enter it, acknowledge it. Raises Refused, UploadBroken."""
        digest = digest_bytes(upload.header.digest)
        try:
            norms = await self._in_io(upload.client, upload.gate.check_file, upload.part.path, digest)
        except WrongDigest:
            # Once it may be a torn prefix from before a restart: sent anew, it is right. Twice, it is the client.
            work = upload.key.SerializeToString(deterministic=True)
            if self._digest_faults.pop(upload.client, None) == work:
                raise
            self._digest_faults[upload.client] = work
            await self._parts.in_io(upload.part.discard)
            raise UploadBroken(upload.key, 0, "the bytes have not the digest of the header") from None
        reason = upload.run.intake.refusal_of(upload.header, upload.client)
        if reason is not None:
            raise Refused(reason, _WORDS[reason])
        await self._parts.in_io(upload.part.seal)
        upload.run.log.delivers(upload.client)
        norm = next(iter(norms.values()))
        record = replace(
            _record(upload.header, upload.client, norm=norm), norms=norms, clip_factor=upload.gate.clip_factor(norm)
        )
        return await self._enter(upload.run, upload.header, record)

    async def _refuse(self, run: Run, header: UpdateHeader, client: str, refusal: Refused) -> Receipt:
        """Enter a refusal, unless the update would not be taken whatever it is, and stop waiting for the client."""
        if refusal.reason in _WORDS:
            return await self._not_taken(run, header, client, refusal.reason)
        reason = RefusalReason.Name(refusal.reason).removeprefix("REFUSAL_REASON_").lower()
        run.tally.refused(reason)
        log.warning(
            "update_refused", run=run.id, round=header.key.round, client=client, reason=reason, why=str(refusal)
        )
        record = _record(header, client, refusal=refusal)
        receipt = await self._enter(run, header, record)
        if refusal.reason == RefusalReason.REFUSAL_REASON_NOT_FINITE:
            run.intake.not_finite_from(client)
        if refusal.reason == RefusalReason.REFUSAL_REASON_NORM:
            run.intake.too_long.add(client)
        await self._parts.fleet.note(client, f"update refused ({reason}): {refusal}"[:300])
        return receipt

    async def _enter(self, run: Run, header: UpdateHeader, record: UpdateRecord) -> Receipt:
        """Write the word on an update down and tell the run: both, also when the stream is cut in between."""
        stands = await asyncio.shield(run.intake.enter(record, header))
        if stands is None:
            reason = run.intake.refusal_of(header, record.client_id) or RefusalReason.REFUSAL_REASON_LATE
            return await self._not_taken(run, header, record.client_id, reason)
        if stands == record:
            run.tally.stale(0)
        return _receipt(header.key, stands)

    async def _not_taken(self, run: Run, header: UpdateHeader, client: str, reason: RefusalReason) -> Receipt:
        """The first word, if an older stream of the update got it in time; else why there will never be one."""
        first = await self.receipt(run, header.key, client)
        if first is None and reason == RefusalReason.REFUSAL_REASON_LATE and header.key.round <= run.state.round:
            run.tally.stale(run.state.round - header.key.round)
        return first or _refusal(header, reason, _WORDS[reason])

    def _count_conflict(self, run: Run, header: UpdateHeader, client: str, first: Receipt) -> None:
        if first.digest.value != header.digest.value:
            self._parts.metrics.update_conflicts.labels(run.id).inc()
            log.warning("update_conflict", run=run.id, round=header.key.round, client=client)


_WORDS = {
    RefusalReason.REFUSAL_REASON_LATE: "the round is closed",
    RefusalReason.REFUSAL_REASON_NOT_ASSIGNED: "not of this round's cohort",
    RefusalReason.REFUSAL_REASON_BANNED: "the client is banned",
}
"""Why an update is not taken, whatever it is: no word on it, and it is not entered."""
_LARGEST = 2**63 - 1
"""Integer that a database holds."""
_LARGEST_SMALL = 2**31 - 1
"""In its columns for small numbers."""


async def _next(requests: Requests, upload: _Upload, patience: Patience) -> Request:
    try:
        return await patience.wait(anext(requests))
    except TimeoutError:
        raise NotNow(f"{patience}; what came is kept", BUSY_WAIT_S) from None
    except StopAsyncIteration:
        raise UploadBroken(upload.key, upload.part.kept_bytes, "the stream ended before the trailer") from None


def _write(upload: _Upload, chunk: ReadChunk, offset: int) -> None:
    """Check a chunk and put it where it belongs; in a worker thread."""
    try:
        check_chunk(chunk, offset, MAX_CHUNK_BYTES, upload.header.size_bytes)
        upload.part.write(chunk.offset, chunk.data, chunk.crc32c)
    except (ChunkError, ValueError) as error:
        raise UploadBroken(upload.key, upload.part.kept_bytes, str(error)) from error


def _close_unused(opening: asyncio.Future[PartFile]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _spool_key(key: ExchangeKey, client: str) -> SpoolKey:
    return SpoolKey(key.run_id, key.round, key.exchange, client)


def _record(header: UpdateHeader, client: str, norm: float = 0.0, refusal: Refused | None = None) -> UpdateRecord:
    """The ledger's line. Of a header that was refused it keeps only what a ledger can hold."""
    loss = header.training_loss if header.HasField("training_loss") else math.nan
    return UpdateRecord(
        run_id=header.key.run_id,
        round=header.key.round,
        exchange=header.key.exchange,
        client_id=client,
        digest=header.digest.value if len(header.digest.value) == 32 else b"",
        size_bytes=min(header.size_bytes, _LARGEST),
        admitted=refusal is None,
        reason="" if refusal is None else RefusalReason.Name(refusal.reason),
        detail="" if refusal is None else str(refusal)[:1000],
        num_examples=min(header.num_examples, _LARGEST),
        num_steps=header.num_steps,
        training_loss=loss if math.isfinite(loss) else None,
        norm=norm,
        attempt=min(header.attempt, _LARGEST_SMALL),
        received_at=time.time(),
    )


def _receipt(key: ExchangeKey, record: UpdateRecord) -> Receipt:
    # What was admitted and then left out of the model gets the first answer again, too.
    reason = None if record.admitted else record.reason or None
    receipt = Receipt(key=key, admitted=record.admitted, reason=reason, detail=record.detail)
    if len(record.digest) == 32:
        receipt.digest.CopyFrom(digest_message(record.digest))
    return receipt


def _refusal(header: UpdateHeader, reason: RefusalReason, detail: str) -> Receipt:
    return Receipt(key=header.key, digest=header.digest, admitted=False, reason=reason, detail=detail)
