"""The outcomes of updates that a client asks for when it registers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from fl_server.run.client_states import accepted_outcome, not_needed_outcome, uncounted_outcome
from fl_server.run.run import Run
from fl_server.runs.table import RunTable
from fl_server.store.ledger import Ledger
from fl_server.store.records import UpdateRecord
from protos.fl.v1.training_pb2 import ExchangeKey, Outcome, RefusalReason

MOST_LOOKED_UP = 256
"""Updates of a client that are looked up for one registration; daemons keep one or two for each run."""


class Outcomes:
    """Finds outcomes in all runs. Lives on the event loop."""

    def __init__(self, ledger: Ledger, table: RunTable) -> None:
        self._table = table
        self._lookup = OutcomeLookup(ledger)

    async def decided(self, keys: Iterable[ExchangeKey], client: str) -> list[Outcome]:
        """The outcomes of a client's updates, as far as they are decided.

        A repeated key is answered once. At most MOST_LOOKED_UP keys are looked up in the ledger; the client asks about
        the others when it registers again.
        """
        outcomes: list[Outcome] = []
        wanted: dict[tuple[Run, int], list[int]] = {}  # the runs: one may be deleted while the ledger is read
        unique = dict.fromkeys((key.run_id, key.exchange, key.round) for key in keys)
        looked_up = 0
        for run_id, exchange, round_ in unique:
            run = self._table.loaded.get(run_id)
            if run is not None and round_ < run.rounds.committed:
                looked_up += 1
                if looked_up <= MOST_LOOKED_UP:
                    wanted.setdefault((run, exchange), []).append(round_)
            elif self._table.is_over(run_id):
                key = ExchangeKey(run_id=run_id, round=round_, exchange=exchange)
                epoch = run.record.state_epoch if run else 0
                outcomes.append(uncounted_outcome(key, RefusalReason.REFUSAL_REASON_ABANDONED, epoch))
        for (run, exchange), rounds in wanted.items():
            outcomes += await self._committed_outcomes(run, exchange, rounds, client)
        return outcomes

    async def _committed_outcomes(self, run: Run, exchange: int, rounds: Iterable[int], client: str) -> list[Outcome]:
        epochs = await run.context.state_epochs(list(rounds))
        if exchange < run.state.policy.exchanges:
            return await self._lookup.find(run.id, exchange, epochs, client)
        keys = (ExchangeKey(run_id=run.id, round=round_, exchange=exchange) for round_ in epochs)
        return [not_needed_outcome(key, epochs[key.round]) for key in keys]


LISTS_KEPT = 16
"""Accepted lists in memory: a fleet that comes back after a restart asks about the same few."""


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
