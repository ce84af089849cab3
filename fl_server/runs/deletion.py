"""Deletes runs, and details of old rounds: because an operator asks for it, or by the limits in server.toml.

The ledger's row says first that a run is being deleted; a start completes what a crash cut short.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import structlog

from fl_server.errors import NoSuchRun, ServerError, WrongState, one_line
from fl_server.run.run import Run
from fl_server.runs.table import RunTable, require_state
from fl_server.services import Services
from fl_server.settings.config import RetentionConfig
from fl_server.store.errors import StoreError
from fl_server.store.ledger import Ledger
from fl_server.store.records import DELETING, ENDED, HistoryRecord, RunRecord

log = structlog.get_logger()

WAIT_S = 20.0
"""How long a call waits for a deletion. A long one goes on in the background."""


class Deletions:
    """Removes the data of runs that the ledger marks as being deleted. Lives on the event loop."""

    def __init__(self, services: Services, table: RunTable) -> None:
        self._services, self._table = services, table
        self._tasks: set[asyncio.Task[bool]] = set()
        self.ids: set[str] = set()
        """Ids of runs that were or are being deleted. They are never used again: daemons may keep them for years."""

    def restore(self, deleted: Iterable[str]) -> None:
        """Read the ids of deleted runs back at a start."""
        self.ids.update(deleted)

    async def delete(self, run_id: str, reason: str, actor: str) -> bool:
        """Delete a run that has ended, or that cannot be loaded. Returns False if its data is still being removed.

        actor: the operator, as history shows it.
        """
        if (problem := self._table.not_loaded.get(run_id)) is not None:
            if problem.loading:
                raise WrongState(run_id, "loading", ENDED, "deleting")
            await self._mark(problem.record, reason, actor)
            self._table.not_loaded.remove(run_id)
        else:
            if (run := self._table.loaded.get(run_id)) is None:
                raise NoSuchRun(run_id)
            await run.in_turn(self._mark_loaded(run, reason, actor))
            await run.close()
        self._services.metrics.reported.removed(run_id)
        return await self._finish(run_id)

    async def _mark_loaded(self, run: Run, reason: str, actor: str) -> None:
        self._table.require(run)
        require_state(run, "deleting", *ENDED)
        await self._mark(run.record, reason, actor)
        del self._table.loaded[run.id]

    async def _mark(self, record: RunRecord, reason: str, actor: str) -> None:
        why = HistoryRecord(time.time(), actor, "run_deleted", record.run_id, one_line(reason))
        ledger = self._services.ledger
        await ledger.do(ledger.store.update_run, replace(record, state=DELETING), why)
        log.info("run_deleted", run=record.run_id, actor=actor, reason=one_line(reason))

    def start(self, run_id: str) -> asyncio.Task[bool]:
        """Remove a run's data in the background. The result: whether all of it is removed."""
        self.ids.add(run_id)
        task = asyncio.create_task(self._remove(run_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _finish(self, run_id: str) -> bool:
        """Remove a run's data. Returns False if that takes longer than a call should, or failed for now."""
        task = self.start(run_id)
        await asyncio.wait({task}, timeout=WAIT_S)
        return task.done() and task.result()

    async def close(self) -> None:
        """Stop where it is: the next start continues."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _remove(self, run_id: str) -> bool:
        services, ledger = self._services, self._services.ledger
        began = time.monotonic()
        try:
            await services.in_compute(services.checkpoints.remove_run, run_id)
            await services.in_io(services.spool.remove_run, run_id)
            await services.in_io(services.secrets.remove, run_id)
            while await ledger.do(ledger.store.remove_rounds, run_id, _ALL):
                pass
            while await ledger.do(ledger.store.remove_run_history, run_id):
                pass
            why = HistoryRecord(time.time(), "coordinator", "run_removed", run_id, "all data of the run is removed")
            await ledger.do(ledger.store.remove_run, run_id, why)
        except StoreError as error:
            log.error("run_not_removed", run=run_id, error=str(error), todo="the next start tries again")
            return False
        log.info("run_removed", run=run_id, seconds=round(time.monotonic() - began, 3))
        return True


_ALL = 2**31 - 1
"""More rounds than a run can have."""


EVERY_S = 60.0
DAY_S = 86_400.0


class Retention:
    """Applies the limits at a start and then every minute. Lives on the event loop."""

    def __init__(self, rules: RetentionConfig, ledger: Ledger, table: RunTable, deletions: Deletions) -> None:
        self._rules, self._ledger, self._table, self._deletions = rules, ledger, table, deletions
        self._removed: dict[str, int] = {}
        """The round of each run before which all details are removed."""

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
        for run_id, why in list(runs_to_delete(self._rules, [*self._table.loaded.values()], time.time())):
            await self._deletions.delete(run_id, why, "coordinator")
        if self._rules.keep_rounds:
            for run in [*self._table.loaded.values()]:
                await self._remove_old_rounds(run)

    async def _remove_old_rounds(self, run: Run) -> None:
        if run.context.keeps_client_state and not run.ended:
            return  # a client's state is made of its last update, however old
        # Rounds in memory are recent, or are still being evaluated.
        before = min([run.rounds.committed - self._rules.keep_rounds, *run.rounds.recent])
        before -= run.state.policy.max_staleness  # updates of so many earlier rounds may be in the rounds that stay
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
