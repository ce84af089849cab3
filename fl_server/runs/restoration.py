"""Restores the runs of the ledger at a start. Runs with code from outside may take long, and hold up no other."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from functools import partial

import structlog

from algorithms import AlgorithmError
from fl_common.waiting import shielded
from fl_server.aggregation.methods import outside_names
from fl_server.aggregation.outside_task.remote_task import RemoteTask
from fl_server.errors import InvalidInput, one_line
from fl_server.outside_calls import CallTimedOut
from fl_server.run.evaluations import directions_of, with_direction
from fl_server.run.restore import continue_run, restore_run
from fl_server.run_settings.spec import from_stored
from fl_server.runs.creation import RunLoading, in_its_own_process
from fl_server.runs.table import Deletions, RunTable
from fl_server.services import Services
from fl_server.store.errors import StoreFull
from fl_server.store.ledger import RETRY_S
from fl_server.store.records import DELETING, ENDED, HistoryRecord, RunRecord
from fl_tasks import TaskError
from fl_tasks.errors import TaskTimedOut, is_own_fault

log = structlog.get_logger()

_TRIES = 2
"""Times that code which does not end in its time is tried: the machine may have been slow."""
_LOADING = "its code is being loaded"


class Restoration:
    """Puts the runs of the ledger into the coordinator's table. Lives on the event loop."""

    def __init__(self, services: Services, table: RunTable, loading: RunLoading, deletions: Deletions) -> None:
        self._services, self._table, self._loading, self._deletions = services, table, loading, deletions
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Runs that are being loaded behind a start."""

    async def restore_all(self) -> None:
        """Restore every run. Runs that were being deleted are deleted to the end.

        Returns when all are restored, or `limits.restore_wait_s` later if some have code from outside: these are
        listed as not loaded until they are.
        """
        ledger, outside = self._services.ledger, self._services.outside
        crashed = dict(outside.crashed)
        self._deletions.restore(await ledger.do(ledger.store.deleted_runs))
        await self._charge_again()
        for record in await ledger.do(ledger.store.runs):
            names, slow = self._outside_code(record)
            if record.state == DELETING:
                self._deletions.start(record.run_id)
            elif why := crashed.pop(record.run_id, "") or outside.crashed_loading.get(names, ""):
                await self._fail(record, why)
            elif record.load_failure:
                self._table.not_loaded.add(record, record.load_failure)
            elif slow:
                self._table.not_loaded.add(record, _LOADING, loading=True)
                self._tasks[record.run_id] = asyncio.create_task(self._restore(record))
            else:
                await self._restore(record)
        for run_id, why in crashed.items():
            log.error("creation_crashed", run=run_id, error=why)
        await self._wait()

    async def _charge_again(self) -> None:
        """Charge the privacy accounts what a ledger that was restored from a backup has lost.

        Charges that a kill left without their count outside of the ledger are counted, before any work is sent.
        """
        ledger, secrets = self._services.ledger, self._services.secrets
        charged = await ledger.do(ledger.store.charged_accounts)
        for account, counted in (await self._services.in_io(secrets.not_counted, charged)).items():
            for charge in (await ledger.do(ledger.store.charges, account))[counted:]:
                await self._services.in_io(secrets.counted, charge)
        missing = await self._services.in_io(secrets.missing, charged)
        for charge in missing:
            await ledger.do(ledger.store.add_charge, charge)
        for account, count in Counter(charge.account for charge in missing).items():
            log.warning("privacy_charged_again", account=account, charges=count, why="the ledger is an older backup")

    async def _wait(self) -> None:
        """Wait for the runs with code from outside, but not for long."""
        if not self._tasks:
            return
        done, late = await asyncio.wait(self._tasks.values(), timeout=self._services.config.limits.restore_wait_s)
        for task in done:
            task.result()
        if late:
            log.warning("runs_still_loading", runs=[run_id for run_id, task in self._tasks.items() if task in late])
        for run_id, task in self._tasks.items():
            task.add_done_callback(partial(_log_end, run_id))

    def drain(self) -> None:
        """Load no more runs: the coordinator is about to stop."""
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """The same, and wait until nothing is loaded any more."""
        self.drain()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def load_again(self, run_id: str) -> None:
        """Load a run whose code failed, because an operator continues it. Other runs are left as they are.

        Raises InvalidInput if it fails again.
        """
        problem = self._table.not_loaded.get(run_id)
        if problem is None or problem.loading or not problem.record.load_failure:
            return
        self._table.not_loaded.add(problem.record, _LOADING, loading=True)
        try:
            await shielded(self._load(problem.record))
        except (TaskError, InvalidInput, AlgorithmError) as error:
            self._table.not_loaded.add(problem.record, str(error))
            raise InvalidInput("run_id", "a run whose code can be loaded", str(error)) from error

    def _outside_code(self, record: RunRecord) -> tuple[str, bool]:
        """The names of the run's method and reducer from outside, and whether it has any code from outside."""
        try:
            config = from_stored(record.spec)
            names = outside_names(config)
            return names, bool(names) or in_its_own_process(config.task, self._services)
        except (TaskError, InvalidInput):
            return "", False  # loading it tells the error

    async def _restore(self, record: RunRecord) -> None:
        """Load a run. One whose code is to blame for a failure fails; any other is listed with the reason."""
        for tries in range(1, _TRIES + 1):
            try:
                await self._load_when_possible(record)
            except (TaskError, InvalidInput, AlgorithmError) as error:
                if (late := _timed_out(error)) and tries < _TRIES:
                    log.warning("run_loaded_again", run=record.run_id, error=str(error))
                    continue
                log.error("run_not_loaded", run=record.run_id, error=str(error))
                self._table.not_loaded.add(record, str(error))
                if record.state not in ENDED and (late or is_own_fault(error)):
                    await self._fail(record, str(error))
            return

    async def _load_when_possible(self, record: RunRecord) -> None:
        """Load a run, and try again while database or store are away, or the disk has no room for a copy."""
        while True:
            try:
                await self._load(record)
            except StoreFull as error:
                log.warning("run_loaded_again", run=record.run_id, error=str(error))
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _load(self, record: RunRecord) -> None:
        """Load a run, and continue it. Raises TaskError, InvalidInput, AlgorithmError."""
        config = from_stored(record.spec)
        config = await self._loading.code(record.run_id, config, ended=record.state in ENDED)
        task = await self._loading.task(config)
        config = with_direction(config, directions_of(config, task.directions))
        run = await self._loading.build(record, config, task, self._services.config.limits.max_model_mib << 20)
        try:
            failure = await restore_run(run)
            self._table.add(run)
            await continue_run(run, failure)
        except BaseException:
            self._table.loaded.pop(record.run_id, None)
            await run.close()
            raise
        if isinstance(task.task, RemoteTask) and run.ended:
            task.task.release()
        attendance = self._services.fleet.attendance
        for client_id in attendance.roster.present():
            if attendance.attached(client_id):
                run.client_attached(client_id)  # it has waited for the run
                run.client_evaluations.tell_end(client_id)  # it may have asked before

    async def _fail(self, record: RunRecord, why: str) -> None:
        """Mark a run as failed, which no start tries again. One that has ended keeps its state."""
        ledger, event, why = self._services.ledger, "run_not_loaded", one_line(why)
        failed = replace(record, load_failure=why)
        if record.state not in ENDED:
            event, failed = "run_failed", replace(failed, state="failed", reason=why, ended_at=time.time())
        log.error(event, run=record.run_id, error=why)
        self._table.not_loaded.add(failed, why)
        try:
            entry = HistoryRecord(time.time(), "coordinator", event, record.run_id, why)
            await ledger.do(ledger.store.update_run, failed, entry)
        except StoreFull as error:
            log.warning("not_told", run=record.run_id, error=str(error))  # the next start tries again


def _timed_out(error: BaseException | None) -> bool:
    """Whether code from outside did not end in its time."""
    while error is not None and not isinstance(error, TaskTimedOut | CallTimedOut):
        error = error.__cause__
    return error is not None


def _log_end(run_id: str, task: asyncio.Task[None]) -> None:
    """Log what went wrong behind a start. The run stays in the ledger as it was; the next start reads it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("run_not_restored", run=run_id, error=repr(error), exc_info=error)
