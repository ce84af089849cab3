"""The table of a coordinator's runs: loaded ones, those that cannot be loaded, and the deletion of runs and old rounds.

The table has the reason why a run is not loaded, for operators. Its id stays taken, and its clients keep what they hold
for it: another configuration may load it again.
Runs and details of old rounds are deleted because an operator asks for it, or by the limits in server.toml. The
ledger's row says first that a run is being deleted; a start completes what a crash cut short.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from fl_common.rate_limits import TokenBucket
from fl_server.errors import NoSuchRun, NotNow, ServerError, WrongState, one_line
from fl_server.run.run import Run
from fl_server.services import Services
from fl_server.settings.config import RetentionConfig
from fl_server.store.errors import StoreError
from fl_server.store.ledger import Ledger
from fl_server.store.records import DELETING, ENDED, HistoryRecord, RunRecord

log = structlog.get_logger()
LOADING_WAIT_S, NOT_LOADED_WAIT_S = 5.0, 60.0
"""Wait of a client for a run that is being loaded, and for one that a start with other settings may load."""
REFUSALS_AT_ONCE, REFUSAL_EVERY_S = 20, 60.0
"""Rows for refused runs of one operator."""
EXPORT_EVERY_S = 3600.0
"""Between two rows for the same model and the same operator."""
MAX_KEYS = 4096
"""Causes that are remembered; the one without an event for longest is forgotten first."""
WAIT_S = 20.0
"""How long a call waits for a deletion. A long one goes on in the background."""
_ALL = 2**31 - 1
"""More rounds than a run can have."""
EVERY_S = 60.0
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """One run, and why it is not loaded."""

    record: RunRecord
    reason: str
    loading: bool = False
    """Whether it is being loaded."""

    @property
    def state(self) -> str:
        """The state to show, as `RunRecord.state`: only of a run whose code failed. Empty: it may be loaded again."""
        return self.record.state if self.record.load_failure and not self.loading else ""

    @property
    def explained(self) -> str:
        """The reason to show."""
        if not self.state:
            return one_line(f"not loaded: {self.reason}")
        return one_line(f"{self.reason}; `fl run resume {self.record.run_id}` loads it again")

    def named(self, section: str) -> str:
        """The name in a section of its spec, "task" or "algorithm"; empty where the spec has none."""
        spec: Any = self.record.spec
        part = spec.get(section) if isinstance(spec, Mapping) else None
        name = part.get("name") if isinstance(part, Mapping) else None
        return one_line(name, 256) if isinstance(name, str) else ""

    @property
    def owner(self) -> str | None:
        """The owner in its spec, which may be unreadable otherwise; None where there is none."""
        spec: Any = self.record.spec
        owner = spec.get("owner") if isinstance(spec, Mapping) else None
        return owner if isinstance(owner, str) else None


class NotLoadedRuns(dict[str, NotLoaded]):
    """All runs that are not loaded, by id, oldest first."""

    def add(self, record: RunRecord, reason: str, *, loading: bool = False) -> None:
        """Add a run, or change its reason. loading: it is being loaded."""
        self[record.run_id] = NotLoaded(record, one_line(reason), loading)

    def ask_again(self, run_id: str) -> None:
        """Raises NotNow if the run is not loaded, and goes on once it is: its clients keep their work until then."""
        if (waiting := self.get(run_id)) is not None and waiting.record.state not in ENDED:
            wait_s = LOADING_WAIT_S if waiting.loading else NOT_LOADED_WAIT_S
            raise NotNow(f"run {run_id!r} is not loaded yet: {waiting.reason}", wait_s, routine=True)

    def refuse(self, run_id: str) -> None:
        """Raises NoSuchRun, with the reason, if the run is not loaded."""
        if (waiting := self.get(run_id)) is not None:
            raise NoSuchRun(run_id, f"run {run_id!r} is in the ledger and not loaded: {waiting.reason}")


class RunTable:
    """Every run of the ledger that is not deleted, by id. Used on the event loop."""

    def __init__(self) -> None:
        self.loaded: dict[str, Run] = {}
        self.not_loaded = NotLoadedRuns()

    def add(self, run: Run) -> None:
        """Add a run in its place: the table is in the order of creation."""
        self.not_loaded.pop(run.id, None)
        self.loaded[run.id] = run
        self.loaded = dict(sorted(self.loaded.items(), key=lambda item: (item[1].record.created_at, item[0])))

    def is_over(self, run_id: str) -> bool:
        """Whether no client works for the run any more: it has ended, or is unknown to this coordinator."""
        run = self.loaded.get(run_id)
        return run_id not in self.not_loaded and (run is None or run.ended)

    def require(self, run: Run) -> None:
        """Raises NoSuchRun if the run was deleted while the caller waited for its turn."""
        if self.loaded.get(run.id) is not run:
            raise NoSuchRun(run.id)


def require_state(run: Run, what: str, *allowed: str) -> None:
    """Raises WrongState."""
    if run.status not in allowed:
        raise WrongState(run.id, run.status, allowed, what)


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
            self._table.not_loaded.pop(run_id, None)
        else:
            if (run := self._table.loaded.get(run_id)) is None:
                raise NoSuchRun(run_id)
            await run.in_turn(self._mark_loaded(run, reason, actor))
            await run.close()
        self._services.metrics.reported.removed(run_id)
        task = self.start(run_id)
        await asyncio.wait({task}, timeout=WAIT_S)
        return task.done() and task.result()

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
