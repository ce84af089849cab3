"""Rows of history for operators' calls that change no run: a run with a refused task, an exported model.

The row is missing if the ledger cannot be written; then the log has it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import structlog

from fl_common.rate_limits import TokenBucket
from fl_server.errors import one_line
from fl_server.store.errors import StoreError
from fl_server.store.ledger import Ledger
from fl_server.store.records import HistoryRecord

log = structlog.get_logger()

REFUSALS_AT_ONCE, REFUSAL_EVERY_S = 20, 60.0
"""Rows for refused runs of one operator."""
EXPORT_EVERY_S = 3600.0
"""Between two rows for the same model and the same operator."""
MAX_KEYS = 4096
"""Causes that are remembered; the one without an event for longest is forgotten first."""


class HistoryRate:
    """Limits the rows of history by cause: `burst` rows at once, and one more every `every_s`; the rest are counted."""

    def __init__(self, burst: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._every_s, self._clock = burst, every_s, clock
        self._buckets: OrderedDict[object, TokenBucket] = OrderedDict()
        self._folded: dict[object, int] = {}
        """Events without a row since the last row, by key."""

    def take(self, key: object) -> int | None:
        """The number of earlier events of the key without a row; None if this event gets no row either."""
        bucket = self._buckets.pop(key, None) or TokenBucket(self._burst, 1.0 / self._every_s)
        self._buckets[key] = bucket
        if len(self._buckets) > MAX_KEYS:
            self._folded.pop(self._buckets.popitem(last=False)[0], None)
        if bucket.take(1.0, self._clock()):
            self._folded[key] = self._folded.get(key, 0) + 1
            return None
        return self._folded.pop(key, 0)


class Audit:
    """Writes the rows, at a limited rate for each cause."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._refusals = HistoryRate(REFUSALS_AT_ONCE, REFUSAL_EVERY_S)
        self._exports = HistoryRate(1, EXPORT_EVERY_S)

    async def run_refused(self, actor: str, run_id: str, task: str, why: str) -> None:
        """A run was not created because of its task. `run_id`: the id it would have had."""
        folded = self._refusals.take(actor)
        if folded is not None:
            detail = f"task {one_line(task, 200)}: {one_line(why)}"
            await self._write(HistoryRecord(time.time(), actor, "run_refused", run_id, _with_count(detail, folded)))

    async def model_exported(self, actor: str, run_id: str, model: str) -> None:
        """A model is about to be sent. `model`: its round, digest and size."""
        folded = self._exports.take((actor, run_id, model))
        if folded is not None:
            await self._write(HistoryRecord(time.time(), actor, "model_exported", run_id, _with_count(model, folded)))

    async def _write(self, why: HistoryRecord) -> None:
        try:
            await self._ledger.do(self._ledger.store.add_history, why)
        except StoreError as error:
            log.warning("history_not_written", error=str(error), row=why.event, subject=why.subject, detail=why.detail)
        else:
            log.info(why.event, run=why.subject, actor=why.actor, detail=why.detail)


def _with_count(detail: str, folded: int) -> str:
    return f"{detail}; {folded} more since the row before" if folded else detail
