"""Uploads at the coordinator: whether one may begin, what becomes of it, what it counts. An update counts whole or not.

The header is checked before any tensor bytes are accepted. The bytes are received by `part_receiver`, here or in a
worker. At the end the whole file is checked, moved into the spool and entered in the ledger; only then is it
acknowledged. The first verdict on a (run, round, exchange, client) stands: a repeat gets the same receipt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import structlog

from fl_common.waiting import shielded
from fl_server.admission.client_rules import MaskedGate, UpdateRefused, epochs_of
from fl_server.admission.gate import AdmissionGate
from fl_server.admission.norms import UpdateContent
from fl_server.aggregation.updates import Source
from fl_server.clients.sessions import Transfer
from fl_server.errors import UploadBroken
from fl_server.run.round_statistics import ClientTransfer
from fl_server.run.run import Run
from fl_server.services import Services
from fl_server.store.errors import StoreError, StoreFull
from fl_server.store.records import UpdateRecord
from fl_server.uploads.part_receiver import Decided, Disk, PartReceiver, spool_key
from fl_server.uploads.stream import Requests
from protos.codec import digest_bytes, digest_message
from protos.fl.v1.training_pb2 import ExchangeKey, Receipt, RefusalReason, UpdateHeader

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
log = structlog.get_logger()

NOT_WANTED = {
    RefusalReason.REFUSAL_REASON_LATE: "the round is closed",
    RefusalReason.REFUSAL_REASON_STALE: "the model that it began from is older than round.max_staleness allows",
    RefusalReason.REFUSAL_REASON_NOT_ASSIGNED: "not of this round's cohort",
    RefusalReason.REFUSAL_REASON_BANNED: "the client is banned",
}
"""Reasons for which any update of the client is refused. They are no verdict on it, and the ledger has no record."""
_LARGEST = 2**63 - 1
"""Largest integer of the database."""
_LARGEST_SMALL = 2**31 - 1
"""Largest integer of its columns for small numbers."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One update that a client sends."""

    run: Run
    header: UpdateHeader
    client: str

    def check_wanted(self) -> None:
        """Raises UpdateRefused if no update of the client is wanted for the exchange any more."""
        reason = self.run.submissions.refusal_of_update(self.header, self.client)
        if reason is not None:
            raise UpdateRefused(reason, NOT_WANTED[reason])


class WrongDigests:
    """Each client's latest work with an update of a wrong digest. One per client, so that memory is bounded."""

    def __init__(self) -> None:
        self._works: dict[str, bytes] = {}

    def is_second(self, header: UpdateHeader, client: str) -> bool:
        """Whether the client's work has had a wrong digest before.

        The first time it may be a prefix torn by a restart, which a new upload repairs; then it is the client.
        """
        work = header.key.SerializeToString(deterministic=True)
        if self._works.pop(client, None) == work:
            return True
        self._works[client] = work
        return False


class Verdicts:
    """Records verdicts and makes receipts."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.wrong_digests = WrongDigests()

    async def receipt(self, run: Run, key: ExchangeKey, client: str) -> Receipt | None:
        """The receipt of the first verdict on the client's update for the key; None if there is none."""
        if key.round > run.state.round or key.exchange >= len(run.context.algorithm.exchanges):
            return None  # no client was asked for it, and the ledger may not be able to hold the number
        known = await self._services.ledger.do(
            self._services.ledger.store.update_of, run.id, key.round, key.exchange, client
        )
        return None if known is None else _receipt(key, known)

    async def repeated(self, submission: Submission) -> Receipt | None:
        """The receipt for a repeat, which gets the first verdict; None if there is no verdict yet."""
        run, header, client = submission.run, submission.header, submission.client
        if run.submissions.undecided(header.key, client):
            return None
        first = await self.receipt(run, header.key, client)
        if first is not None and first.digest.value != header.digest.value:
            self._services.metrics.update_conflicts.labels(run.id).inc()
            run.context.cohort_log.warning("update_conflict", run=run.id, round=header.key.round, client=client)
        return first

    async def admit(self, submission: Submission, norms: Mapping[str, float], clip_factor: float) -> Receipt:
        """Record that an update counts."""
        header, client = submission.header, submission.client
        work_s, transfer_s = submission.run.rounds.transfers.seconds(client)
        record = replace(
            _record(header, client, norm=next(iter(norms.values()))), norms=norms, clip_factor=clip_factor,
            epochs=epochs_of(header), work_s=work_s, transfer_s=transfer_s,
        )  # fmt: skip
        return await self._enter(submission, record)

    async def refuse(self, submission: Submission, refusal: UpdateRefused) -> Receipt:
        """Record a refusal; the run no longer waits for the client. Without a record if no update is wanted."""
        if refusal.reason in NOT_WANTED:
            return await self._not_wanted(submission, refusal.reason)
        run, header, client = submission.run, submission.header, submission.client
        record = _record(header, client, refusal=refusal)
        reason = record.refused_for
        run.context.cohort_log.warning(
            "update_refused", run=run.id, round=header.key.round, client=client, reason=reason, why=str(refusal)
        )
        receipt = await self._enter(submission, record)
        await self._services.fleet.records.write_note(client, f"update refused ({reason}): {refusal}"[:300])
        return receipt

    async def _enter(self, submission: Submission, record: UpdateRecord) -> Receipt:
        """Write the verdict and let the run act on it: both, also when the stream is cut in between."""
        run, header = submission.run, submission.header
        stands = await shielded(run.submissions.record_verdict(record, header))
        if stands is None:
            reason = run.submissions.refusal_of_update(header, record.client_id) or RefusalReason.REFUSAL_REASON_LATE
            return await self._not_wanted(submission, reason)
        return _receipt(header.key, stands)

    async def _not_wanted(self, submission: Submission, reason: RefusalReason) -> Receipt:
        """The first verdict, if an older stream of the update got one in time; otherwise the reason."""
        run, header = submission.run, submission.header
        first = await self.receipt(run, header.key, submission.client)
        if first is None and reason == RefusalReason.REFUSAL_REASON_LATE and header.key.round <= run.state.round:
            run.context.counters.staleness(run.state.round - header.key.round)
        detail = NOT_WANTED[reason]
        return first or Receipt(key=header.key, digest=header.digest, admitted=False, reason=reason, detail=detail)


def _record(header: UpdateHeader, client: str, norm: float = 0.0, refusal: UpdateRefused | None = None) -> UpdateRecord:
    """The record of a verdict. A refused header keeps only values that the ledger can hold."""
    loss = header.training_loss if header.HasField("training_loss") else math.nan
    spent, delta = header.privacy.epsilon, header.privacy.applied.delta
    shared = header.privacy.HasField("epsilon") and math.isfinite(spent) and spent >= 0
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
        epsilon=spent if shared else None,
        delta=delta if header.HasField("privacy") and 0 < delta < 1 else None,
    )


def _receipt(key: ExchangeKey, record: UpdateRecord) -> Receipt:
    # An update that was admitted and then left out of the model keeps its first receipt.
    reason = None if record.admitted else record.reason or None
    receipt = Receipt(key=key, admitted=record.admitted, reason=reason, detail=record.detail)
    if len(record.digest) == 32:
        receipt.digest.CopyFrom(digest_message(record.digest))
    return receipt


class UploadReceiver:
    """The uploads of all runs."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._verdicts = Verdicts(services)
        self.disk = Disk(services.config, services.spool, services.metrics, services.io, services.fleet.transfer_limits)
        self._parts = PartReceiver(self.disk)
        self.in_flight = 0
        """Open streams."""

    async def submit(self, run: Run, header: UpdateHeader, transfer: Transfer, requests: Requests) -> Receipt:
        """Receive one upload behind its header; returns the receipt. Raises the error that ended the transfer."""
        try:
            opened = await self.open(run, header, transfer)
        except Decided as decided:
            return decided.receipt
        with self.counted():
            return await self._parts.receive(opened, requests)

    async def open(self, run: Run, header: UpdateHeader, transfer: Transfer) -> ControlledUpload:
        """An upload whose bytes may come. Raises Decided."""
        submission = Submission(run, header, transfer.client_id)
        if (first := await self._verdicts.repeated(submission)) is not None:
            raise Decided(first)
        try:
            submission.check_wanted()
            gate = run.submissions.gate(transfer.client_id)
            gate.check_header(header)
        except UpdateRefused as refusal:
            raise Decided(await self._verdicts.refuse(submission, refusal)) from None
        return ControlledUpload(self._services, self.disk, self._verdicts, submission, gate, transfer)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count an open upload as long as the block."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def query(self, run: Run, key: ExchangeKey, client: str) -> tuple[Receipt | None, bool]:
        """The receipt of the first verdict on the client's update for the key, and whether bytes of one are of use."""
        if not run.submissions.undecided(key, client):
            receipt = await self._verdicts.receipt(run, key, client)
            if receipt is not None:
                return receipt, False
        return None, run.submissions.refusal_for(key, client) is None

    async def kept_bytes(self, key: ExchangeKey, client: str, digest: bytes) -> int:
        """The offset at which an upload with that digest continues."""
        return await self._services.in_reads(self._services.spool.kept, spool_key(key, client), digest)


class ControlledUpload:
    """One upload, with what the coordinator decides about it; see `OpenUpload`."""

    def __init__(  # noqa: PLR0913, PLR0917 - what one upload consists of
        self,
        services: Services,
        disk: Disk,
        verdicts: Verdicts,
        submission: Submission,
        gate: AdmissionGate | MaskedGate,
        transfer: Transfer,
    ) -> None:
        self._services, self._disk, self._verdicts = services, disk, verdicts
        self.submission, self.gate, self._transfer = submission, gate, transfer
        self._caller = services.fleet.transfer_limits.of(submission.client)
        self._norms: dict[str, float] = {}
        self._shown: ClientTransfer

    @property
    def header(self) -> UpdateHeader:
        """Its header."""
        return self.submission.header

    @property
    def client(self) -> str:
        """Who sends it."""
        return self.submission.client

    async def unless_ended(self, work: Coroutine[Any, Any, T]) -> T:
        """See OpenUpload."""
        with self.under_way():
            return await self._transfer.unless_ended(work)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """The transfer of the bytes, for tables and counts. What was sent before is known to be kept by now."""
        header, rounds = self.header, self.submission.run.rounds
        rounds.bytes.upload_started(self.client, header.resume_offset)
        if header.resume_offset:
            self._services.metrics.uploads_resumed.inc()
            write = self.submission.run.context.cohort_log.info
            write("upload_resumed", run=header.key.run_id, client=self.client, offset=header.resume_offset)
        with rounds.transfers.transfer(self.client, "up", header.size_bytes, header.resume_offset) as self._shown:
            yield

    def check(self) -> None:
        """See OpenUpload. The client may be banned by now, or have a newer session."""
        self._services.fleet.sessions.of_call(self.header.session_id)

    def is_over(self) -> bool:
        """See OpenUpload."""
        return self.submission.run.ended

    def wrote(self, count: int) -> None:
        """See OpenUpload."""
        self._services.metrics.bytes.labels("up", "update").inc(count)
        self.submission.run.rounds.bytes.total_up += count

    async def advance(self, count: int) -> None:
        """See OpenUpload."""
        self._shown.done += count
        await self._caller.pace(count)
        await self._decide(self.submission.check_wanted)

    def read(self, path: Path) -> UpdateContent:
        """See OpenUpload."""
        return self.gate.read(path, self.header.num_steps)

    async def check_content(self, content: UpdateContent, path: Source) -> None:
        """See OpenUpload."""
        digest, steps = digest_bytes(self.header.digest), self.header.num_steps
        self.check_digest(content.digest)
        update = self.gate.update_in(path, steps)
        self._norms = await self._decide_in_io(self.gate.check_content, update, digest, content)
        await self._decide(self.submission.check_wanted)

    def check_digest(self, came: bytes) -> None:
        """Raises UploadBroken for the first wrong digest; `check_content` has the update refused for the second."""
        wrong = self._verdicts.wrong_digests
        if came != digest_bytes(self.header.digest) and not wrong.is_second(self.header, self.client):
            raise UploadBroken(self.header.key, 0, "the bytes have not the digest of the header")

    async def admit(self) -> Receipt:
        """See OpenUpload."""
        run = self.submission.run
        run.rounds.bytes.upload_completed(self.client)
        clip_factor = self.gate.clip_factor(next(iter(self._norms.values())))
        receipt = await self._verdicts.admit(self.submission, self._norms, clip_factor)
        run.run_status.upload_stored()
        return receipt

    async def failed(self, error: StoreError) -> Receipt:
        """See OpenUpload. An update whose round was closed is late: its files are gone, also under an open upload."""
        try:
            await self._decide(self.submission.check_wanted)
        except Decided as decided:
            return decided.receipt
        if isinstance(error, StoreFull):
            self.submission.run.run_status.upload_failed(str(error))
        raise error

    async def _decide_in_io(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await self._disk.of_client(self.client, function, *args, **kwargs)
        except UpdateRefused as refusal:
            raise await self._refused(refusal) from None

    async def _decide(self, check: Callable[[], None]) -> None:
        try:
            check()
        except UpdateRefused as refusal:
            raise await self._refused(refusal) from None

    async def _refused(self, refusal: UpdateRefused) -> Decided:
        """The decision on an update that a rule refuses; the first one on the work stands."""
        first = await self._verdicts.receipt(self.submission.run, self.header.key, self.client)
        self._transfer.check()
        return Decided(first or await self._verdicts.refuse(self.submission, refusal))
