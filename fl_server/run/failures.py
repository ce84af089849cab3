"""What goes wrong with the work of the round under way: failures, daemons that end in it, and missed deadlines.

All of it is in the ledger before it has an effect, so that a coordinator that starts again decides the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import structlog

from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.store.records import FailureRecord, HistoryRecord

log = structlog.get_logger()

MOST_LINES = 10
"""Lines of history about the failures of one round, for the first failure of each cause."""
MAX_NOTE = 300
"""Characters of a message in notes and history."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a client's work failed."""

    why: str
    """The reason in words."""
    cause: str = ""
    """Type and place of the error, if the task's own code raised one."""
    not_finite: bool = False
    """Whether the client got a NaN or an infinity."""
    of_code: bool = True
    """Whether the task's code may be the cause: it counts against the package that it comes from."""


class Failures:
    """The failures of one run. Lives on the event loop; what changes them holds the run's turn."""

    def __init__(self, context: RunContext, control: RunControl) -> None:
        self._context, self._control = context, control
        self._records: dict[tuple[int, str], FailureRecord] = {}
        """The failures in the round under way, by exchange and client."""
        self._processes: dict[str, str] = {}
        """The process of each client's daemon that has its assignment, by client."""
        self._told: set[str] = set()
        """Causes and reasons of this round that have a line in the history."""
        self.latest: FailureRecord | None = None
        """The latest failed work of the run."""
        self.clients = 0
        """Clients whose work failed in the round of `latest`."""

    def restore(self, records: Iterable[FailureRecord], latest: FailureRecord | None) -> None:
        """Take over the ledger's records of the round under way, and the latest failure."""
        self._records = {(record.exchange, record.client_id): record for record in records}
        self._told = {record.cause or record.detail for record in self._records.values() if record.failures}
        self.latest = latest
        self._count_clients()
        for client in self._control.state.outstanding:
            known = self._context.fleet.records.find(client)
            if process := self.of(client).instance_id or (known.instance_id if known else ""):
                self._processes[client] = process

    def clear(self) -> None:
        """The round is over or redrawn. What is known of clients that work on stays."""
        working = self._control.state.outstanding if self._control.state.policy.buffered else frozenset[str]()
        self._records = {key: record for key, record in self._records.items() if key[1] in working}
        self._processes = {client: process for client, process in self._processes.items() if client in working}
        self._told.clear()

    def of(self, client: str) -> FailureRecord:
        """What went wrong with the client's work in the exchange under way."""
        round_, exchange = self._control.state.place_of(client)
        known = self._records.get((exchange, client))
        return (
            known if known and known.round == round_ else FailureRecord(self._context.run_id, round_, exchange, client)
        )

    async def add(self, client: str, reason: Reason) -> None:
        """A client's work has failed."""
        before = self.of(client)
        failed = replace(
            before, failures=before.failures + 1, cause=reason.cause, detail=reason.why, failed_at=time.time(),
            not_finite=reason.not_finite,
        )  # fmt: skip
        line, key = None, reason.cause or reason.why
        if key not in self._told and len(self._told) < MOST_LINES and not self._context.hides_cohorts:
            self._told.add(key)
            detail = f"round {failed.round}, {client}: {reason.why[:MAX_NOTE]}"
            line = HistoryRecord(failed.failed_at, "coordinator", "client_failed", failed.run_id, detail)
        package = self._control.eligible.package_of(client) if reason.of_code else ""
        await self._keep(failed, line, package)
        self._context.fleet.work.changed([client])
        self.latest = failed
        self._count_clients()

    def _count_clients(self) -> None:
        latest = self.latest
        in_round = (
            [] if latest is None else [record for record in self._records.values() if record.round == latest.round]
        )
        self.clients = max(len({record.client_id for record in in_round if record.failures}), int(latest is not None))

    async def _keep(self, record: FailureRecord, line: HistoryRecord | None = None, package: str = "") -> None:
        await self._control.write(self._context.store.put_failure, record, line, package)
        self._records[record.exchange, record.client_id] = record

    async def count(self, client: str, reason: str) -> None:
        """Note a failure on the client; failures in a row count towards quarantine."""
        fleet, where = self._context.fleet, self._context.place_of(self._control.state.round)
        await fleet.records.write_note(client, reason[:MAX_NOTE])
        record, quarantined = fleet.quarantine.count_failure(client, f"{where} ({reason[:MAX_NOTE]})")
        if record is not None:
            await self._control.write(self._context.store.put_quarantine_record, record, quarantined)
            fleet.keep_refusals(record, quarantined)

    # Daemons that end while they work.

    def sent(self, client: str) -> None:
        """The client's assignment goes to the process that is attached now."""
        if process := self._context.fleet.attendance.process_of(client):
            self._processes[client] = process

    def sent_to_another(self, client: str) -> bool:
        """Whether the client's assignment went to another process of its daemon, which has ended without an answer."""
        return self._processes.get(client) not in (None, self._context.fleet.attendance.process_of(client))

    async def add_restart(self, client: str) -> None:
        """The daemon of a client at work has started again."""
        before, process = self.of(client), self._context.fleet.attendance.process_of(client)
        await self._keep(replace(before, restarts=before.restarts + 1, instance_id=process))
        self._processes[client] = process

    # Deadlines.

    async def add_missed_deadline(self, late: tuple[str, ...]) -> list[tuple[str, str]]:
        """Count a deadline that these clients missed. Returns those that are in quarantine now, with the reason."""
        context, fleet, state = self._context, self._context.fleet, self._control.state
        what = (
            f"the last one in {context.place_of(state.round)}, after"
            f" {self._control.config.round.deadline_s:g} s; at least as many clients delivered in time, so its training"
            " hangs, or it is too slow for round.deadline_s"
        )
        warning = context.cohort_log.warning
        warning("deadline_missed", run=context.run_id, round=state.round, clients=len(late), first=late[0])
        verdicts = [fleet.quarantine.count_deadline(client, what) for client in late]
        records = [(record, why) for record, why in verdicts if record is not None]
        if records:
            await self._control.write(context.store.put_quarantine_records, records)
        for record, why in records:
            fleet.keep_refusals(record, why)
        return [(record.client_id, record.reason) for record, why in records if why is not None]
