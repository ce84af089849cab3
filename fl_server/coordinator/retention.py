"""Deletes ended runs, and details of old rounds, by the limits in server.toml."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

import structlog

from fl_server.config import RetentionConfig
from fl_server.errors import ServerError
from fl_server.runs.run import Run
from fl_server.store.errors import StoreError
from fl_server.store.ledger import Ledger

log = structlog.get_logger()

EVERY_S = 60.0
DAY_S = 86_400.0

Delete = Callable[[str, str, str], Awaitable[bool]]
"""Deletes a run: (id, reason, actor)."""


class Retention:
    """Applies the limits at a start and then every minute. Lives on the event loop."""

    def __init__(self, rules: RetentionConfig, ledger: Ledger, runs: Callable[[], Sequence[Run]], delete: Delete):
        self._rules, self._ledger, self._runs, self._delete = rules, ledger, runs, delete
        self._removed: dict[str, int] = {}
        """By run: the round before which all details are removed."""

    async def apply_regularly(self) -> None:
        """Apply the limits until this is cancelled."""
        while self._rules.limits_anything:
            try:
                await self.apply()
            except (StoreError, ServerError) as error:
                log.warning("retention_failed", error=str(error))
            await asyncio.sleep(EVERY_S)

    async def apply(self) -> None:
        """Apply the limits once. Raises StoreError."""
        for run_id, why in list(runs_to_delete(self._rules, self._runs(), time.time())):
            await self._delete(run_id, why, "coordinator")
        if self._rules.keep_rounds:
            for run in self._runs():
                await self._remove_old_rounds(run)

    async def _remove_old_rounds(self, run: Run) -> None:
        if run.context.keeps_client_state and not run.ended:
            return  # a client's state is made of its last update, however old
        # Rounds in memory are recent, or are still being evaluated.
        before = min([run.log.rounds - self._rules.keep_rounds, *run.log.recent])
        if before <= self._removed.get(run.id, 0):
            return
        while await self._ledger.do(self._ledger.store.remove_rounds, run.id, before):
            pass
        self._removed[run.id] = before


def runs_to_delete(rules: RetentionConfig, runs: Sequence[Run], now: float) -> Iterator[tuple[str, str]]:
    """(id, reason) of the ended runs that are over a limit. now: Unix seconds."""
    ended = sorted((run.record.ended_at, run.id) for run in runs if run.ended and run.record.ended_at is not None)
    for number, (ended_at, run_id) in enumerate(reversed(ended)):
        if rules.keep_runs and number >= rules.keep_runs:
            yield run_id, f"retention.keep_runs = {rules.keep_runs}"
        elif rules.keep_days and now - ended_at > rules.keep_days * DAY_S:
            yield run_id, f"retention.keep_days = {rules.keep_days:g}"
