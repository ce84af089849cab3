"""What became of updates, as their clients are told it once that is decided."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fl_server.ledger import Ledger, until_room
from fl_server.store.base import UpdateRecord
from protos.codec import digest_message
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, Outcome, RefusalReason

if TYPE_CHECKING:
    from fl_server.run import Run


LISTS_KEPT = 16
"""Accepted lists in memory: a fleet that comes back after a restart asks about the same few."""


def counted_outcome(update: UpdateRecord, state_epoch: int) -> Outcome:
    """What the client of an update is told that is part of a committed model."""
    return Outcome(
        key=ExchangeKey(run_id=update.run_id, round=update.round, exchange=update.exchange),
        digest=digest_message(update.digest),
        counted=True,
        clip_factor=update.clip_factor,
        state_epoch=state_epoch,
    )


def uncounted_outcome(key: ExchangeKey, reason: RefusalReason, state_epoch: int) -> Outcome:
    """What a client is told whose update is not part of a committed model."""
    return Outcome(key=key, counted=False, clip_factor=1.0, reason=reason, state_epoch=state_epoch)


async def tell_outcomes(run: Run, round_: int) -> None:
    """To everybody who was asked in any exchange of the round."""
    store = run.parts.ledger.store
    asked: dict[int, set[str]] = {}
    for attempt in await run.parts.ledger.insist(run.no_room, store.attempts, run.id, round_):
        asked.setdefault(attempt.exchange, set()).update(attempt.cohort)
    for exchange, clients in asked.items():
        key = ExchangeKey(run_id=run.id, round=round_, exchange=exchange)
        outcomes = await until_room(run.no_room, partial(outcomes_of, run, key))
        for client in clients:
            outcome = outcomes.get(client) or not_needed(run, key)
            run.parts.fleet.push(client, pb.AttendResponse(outcome=outcome))


async def outcomes_of(run: Run, key: ExchangeKey) -> dict[str, Outcome]:
    """Of the updates that a committed round accepted, by client: part of its model, or left out by its reducer."""
    store, epoch = run.parts.ledger.store, run.log.commits[key.round].state_epoch
    fixed = set(await run.parts.ledger.do(store.accepted, run.id, key.round, key.exchange) or ())
    updates = await run.parts.ledger.do(store.updates, run.id, key.round, key.exchange)
    return {
        update.client_id: _accepted_outcome(update, epoch)
        for update in updates
        if (update.client_id, update.digest) in fixed
    }


class OutcomeLookup:
    """Outcomes of single clients, read from the ledger: so many lines as were asked for, however large the rounds were.

    Of an accepted list, which is one line for the whole cohort, the latest are kept; they never change.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lists: OrderedDict[tuple[str, int, int], Mapping[str, bytes]] = OrderedDict()
        self._reading = asyncio.Lock()
        """Held by whoever reads a list: those that want the same one wait for it."""

    async def of(self, run: Run, exchange: int, rounds: Sequence[int], client: str) -> list[Outcome]:
        """What became of a client's updates of an exchange of committed rounds."""
        found: dict[int, UpdateRecord] = {}
        if exchange < run.state.policy.exchanges:
            store = self._ledger.store
            lines = await self._ledger.do(store.updates_of, run.id, exchange, rounds, client)
            found = {line.round: line for line in lines if line.admitted}
        outcomes = []
        for round_ in rounds:
            update = found.get(round_)
            if update is not None and await self._is_accepted(update):
                outcomes.append(_accepted_outcome(update, run.log.commits[round_].state_epoch))
            else:
                outcomes.append(not_needed(run, ExchangeKey(run_id=run.id, round=round_, exchange=exchange)))
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


def _accepted_outcome(update: UpdateRecord, state_epoch: int) -> Outcome:
    """Part of the committed model, or left out of it by the reducer."""
    return _left_out(update, state_epoch) if update.left_out else counted_outcome(update, state_epoch)


def _left_out(update: UpdateRecord, state_epoch: int) -> Outcome:
    key = ExchangeKey(run_id=update.run_id, round=update.round, exchange=update.exchange)
    outcome = uncounted_outcome(key, RefusalReason.REFUSAL_REASON_LEFT_OUT, state_epoch)
    outcome.digest.CopyFrom(digest_message(update.digest))
    return outcome


def not_needed(run: Run, key: ExchangeKey) -> Outcome:
    """For who is not part of a committed round."""
    epoch = run.log.commits[key.round].state_epoch
    return uncounted_outcome(key, RefusalReason.REFUSAL_REASON_NOT_NEEDED, epoch)
