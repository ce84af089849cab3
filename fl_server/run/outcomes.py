"""Outcomes of updates, made from the ledger's records: the messages to clients after a round is committed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping

from fl_server.store.ledger import Ledger
from fl_server.store.records import UpdateRecord
from protos.codec import digest_message
from protos.fl.v1.training_pb2 import ExchangeKey, Outcome, RefusalReason

LISTS_KEPT = 16
"""Accepted lists in memory: a fleet that comes back after a restart asks about the same few."""


def counted_outcome(update: UpdateRecord, state_epoch: int) -> Outcome:
    """The update is part of a committed model."""
    return Outcome(
        key=ExchangeKey(run_id=update.run_id, round=update.round, exchange=update.exchange),
        digest=digest_message(update.digest),
        counted=True,
        clip_factor=update.clip_factor,
        state_epoch=state_epoch,
    )


def uncounted_outcome(key: ExchangeKey, reason: RefusalReason, state_epoch: int) -> Outcome:
    """No update of the client for the key is part of a committed model."""
    return Outcome(key=key, counted=False, clip_factor=1.0, reason=reason, state_epoch=state_epoch)


def refused_outcome(update: UpdateRecord, reason: RefusalReason, state_epoch: int) -> Outcome:
    """This update was accepted and is not part of a committed model."""
    key = ExchangeKey(run_id=update.run_id, round=update.round, exchange=update.exchange)
    outcome = uncounted_outcome(key, reason, state_epoch)
    outcome.digest.CopyFrom(digest_message(update.digest))
    return outcome


def accepted_outcome(update: UpdateRecord, state_epoch: int) -> Outcome:
    """An accepted update of a committed round: part of the model, or left out by the reducer."""
    if update.left_out:
        return refused_outcome(update, RefusalReason.REFUSAL_REASON_LEFT_OUT, state_epoch)
    return counted_outcome(update, state_epoch)


def not_needed_outcome(key: ExchangeKey, state_epoch: int) -> Outcome:
    """For a client without an accepted update in a committed round."""
    return uncounted_outcome(key, RefusalReason.REFUSAL_REASON_NOT_NEEDED, state_epoch)


class OutcomeLookup:
    """Looks up outcomes of single clients in the ledger, without reading whole rounds.

    An accepted list is one row for the whole cohort. The latest ones are kept in memory; they never change.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lists: OrderedDict[tuple[str, int, int], Mapping[str, bytes]] = OrderedDict()
        self._reading = asyncio.Lock()
        """Held while a list is read, so that each list is read once."""

    async def find(self, run_id: str, exchange: int, epochs: Mapping[int, int], client: str) -> list[Outcome]:
        """The outcomes of a client in an exchange of committed rounds. epochs: state epoch by round."""
        rows = await self._ledger.do(self._ledger.store.updates_of, run_id, exchange, list(epochs), client)
        found = {row.round: row for row in rows if row.admitted}
        outcomes = []
        for round_, epoch in epochs.items():
            update = found.get(round_)
            if update is not None and await self._is_accepted(update):
                outcomes.append(accepted_outcome(update, epoch))
            else:
                key = ExchangeKey(run_id=run_id, round=round_, exchange=exchange)
                outcomes.append(not_needed_outcome(key, epoch))
        return outcomes

    async def _is_accepted(self, update: UpdateRecord) -> bool:
        key = (update.run_id, update.round, update.exchange)
        async with self._reading:
            if key not in self._lists:
                self._lists[key] = dict(await self._ledger.do(self._ledger.store.accepted, *key) or ())
            self._lists.move_to_end(key)
            while len(self._lists) > LISTS_KEPT:
                self._lists.popitem(last=False)
            return self._lists[key].get(update.client_id) == update.digest
