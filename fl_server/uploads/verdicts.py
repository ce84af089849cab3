"""Verdicts on updates: their records in the ledger and the receipts of clients.

The first verdict on a (run, round, exchange, client) stands: a repeat gets the same receipt.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import structlog

from fl_server.admission.client_rules import UpdateRefused, epochs_of
from fl_server.run.run import Run
from fl_server.services import Services
from fl_server.store.records import UpdateRecord
from protos.codec import digest_message
from protos.fl.v1.training_pb2 import ExchangeKey, Receipt, RefusalReason, UpdateHeader

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

    @property
    def key(self) -> ExchangeKey:
        """Run, round and exchange of the update."""
        return self.header.key

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
        record = _record(submission.header, submission.client, norm=next(iter(norms.values())))
        record = replace(record, norms=norms, clip_factor=clip_factor, epochs=epochs_of(submission.header))
        work_s, transfer_s = submission.run.rounds.transfers.seconds(submission.client)
        record = replace(record, work_s=work_s, transfer_s=transfer_s)
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
        stands = await asyncio.shield(run.submissions.record_verdict(record, header))
        if stands is None:
            reason = run.submissions.refusal_of_update(header, record.client_id) or RefusalReason.REFUSAL_REASON_LATE
            return await self._not_wanted(submission, reason)
        if stands == record and not run.state.policy.buffered:  # there it is known with the step
            run.context.counters.staleness(0)
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
