"""The outcomes of updates that a client asks for when it registers."""

from __future__ import annotations

from collections.abc import Iterable

from fl_server.run.committed_rounds import state_epochs
from fl_server.run.outcomes import OutcomeLookup, not_needed_outcome, uncounted_outcome
from fl_server.run.run import Run
from fl_server.runs.table import RunTable
from fl_server.store.ledger import Ledger
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
        epochs = await state_epochs(run.context, list(rounds))
        if exchange < run.state.policy.exchanges:
            return await self._lookup.find(run.id, exchange, epochs, client)
        keys = (ExchangeKey(run_id=run.id, round=round_, exchange=exchange) for round_ in epochs)
        return [not_needed_outcome(key, epochs[key.round]) for key in keys]
