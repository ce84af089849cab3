"""Deletes runs. The ledger's row says first that a run is being deleted; a start completes what a crash cut short."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import structlog

from fl_server.services import Services
from fl_server.store.errors import StoreError
from fl_server.store.records import HistoryRecord

log = structlog.get_logger()

WAIT_S = 20.0
"""How long a call waits for a deletion. A long one goes on in the background."""


class Deletions:
    """Removes the data of runs that the ledger marks as being deleted. Lives on the event loop."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._tasks: set[asyncio.Task[bool]] = set()
        self.ids: set[str] = set()
        """Ids of runs that were or are being deleted. They are never used again: daemons may keep them for years."""

    def restore(self, deleted: Iterable[str]) -> None:
        """Read the ids of deleted runs back at a start."""
        self.ids.update(deleted)

    def start(self, run_id: str) -> asyncio.Task[bool]:
        """Remove a run's data in the background. The result: whether all of it is removed."""
        self.ids.add(run_id)
        task = asyncio.create_task(self._remove(run_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, run_id: str) -> bool:
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
