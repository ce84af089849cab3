"""Rows of history for what operators tried and read: a run whose task was refused, a model that was exported.

Nothing of a run changes by either, so the row may be missing where the ledger cannot be written; the log has it then.
"""

from __future__ import annotations

import time

import structlog

from fl_server.errors import one_line
from fl_server.ledger import Ledger
from fl_server.runs.history_rate import HistoryRate
from fl_server.store.base import HistoryRecord, StoreError

log = structlog.get_logger()

REFUSALS_AT_ONCE, REFUSAL_EVERY_S = 20, 60.0
"""Rows for runs that one operator asked for and was refused."""
EXPORT_EVERY_S = 3600.0
"""Between two rows for the same model and the same operator."""


class Audit:
    """Writes the rows, as many of one cause as are worth reading."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._refusals = HistoryRate(REFUSALS_AT_ONCE, REFUSAL_EVERY_S)
        self._exports = HistoryRate(1, EXPORT_EVERY_S)

    async def run_refused(self, actor: str, run_id: str, task: str, why: str) -> None:
        """A run was not created because of its task. `run_id`: the id it would have had."""
        folded = self._refusals.take(actor)
        if folded is not None:
            detail = f"task {one_line(task, 200)}: {one_line(why)}"
            await self._write(HistoryRecord(time.time(), actor, "run_refused", run_id, _and_more(detail, folded)))

    async def model_exported(self, actor: str, run_id: str, what: str) -> None:
        """A model is about to be sent. `what`: its round, digest and size."""
        folded = self._exports.take((actor, run_id, what))
        if folded is not None:
            await self._write(HistoryRecord(time.time(), actor, "model_exported", run_id, _and_more(what, folded)))

    async def _write(self, why: HistoryRecord) -> None:
        try:
            await self._ledger.do(self._ledger.store.add_history, why)
        except StoreError as error:
            log.warning("history_not_written", error=str(error), row=why.event, subject=why.subject, detail=why.detail)
        else:
            log.info(why.event, run=why.subject, actor=why.actor, detail=why.detail)


def _and_more(detail: str, folded: int) -> str:
    return f"{detail}; {folded} more since the row before" if folded else detail
