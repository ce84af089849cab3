"""Time limits, and what goes wrong with the work of a round: failures, daemons that end in it, and missed deadlines.

All of it is in the ledger before it has an effect, so that a coordinator that starts again decides the same.
Time while the coordinator is down does not count. The time left is written to the ledger every few seconds and when
the coordinator stops. After kill -9 a limit is at most those few seconds longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog

from fl_server.rounds import events as ev
from fl_server.rounds.state import Phase
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.store.errors import StoreError
from fl_server.store.records import FailureRecord, HistoryRecord

log = structlog.get_logger()
SAVE_EVERY_S = 5.0
"""Between two writes of the time left."""
Attempt = tuple[int, int, int]
"""Round, exchange and number of an attempt."""
_Timed = tuple[int, int, int, Phase]
"""The same with its stage. Each draw of a run with a buffer goes on in all phases, and has COLLECTING here."""
MOST_LINES = 10
"""Lines of history about the failures of one round, for the first failure of each cause."""
MAX_NOTE = 300
"""Characters of a message in notes and history."""


class Deadline:
    """The deadline of the attempt under way; with a buffer, that of each draw. Lives on the event loop."""

    def __init__(self, context: RunContext, control: RunControl) -> None:
        self._context, self._control = context, control
        self._ends: dict[_Timed, float] = {}
        """When the attempts and stages end that it was started for, by the monotonic clock; some may be over."""

    @property
    def started(self) -> bool:
        """Whether the attempt under way has its deadline: it is started after the cohort is stored."""
        return self._attempt_under_way in self._ends

    @property
    def seconds_left(self) -> float:
        """Seconds until the attempt under way is over; 0 at least. With a buffer: until the first draw is."""
        return self._left(min((self._ends.get(attempt, 0.0) for attempt in self._open), default=0.0))

    def seconds_of(self, client: str) -> float:
        """Seconds that a client with work has left."""
        state = self._control.state
        if not state.policy.buffered:
            return self.seconds_left
        work = state.work[client]
        return self._left(self._ends.get((work.version, 0, work.attempt, Phase.COLLECTING), 0.0))

    @staticmethod
    def _left(ends: float) -> float:
        return max(0.0, ends - time.monotonic())

    def start(self, seconds: float, attempt: Attempt | None = None) -> None:
        """Give the attempt under way, or this draw, so long from now."""
        buffered = self._control.state.policy.buffered
        timed = self._attempt_under_way if attempt is None else (*attempt, self._attempt_under_way[3])
        kept = {one: ends for one, ends in self._ends.items() if one in self._open} if buffered else {}
        self._ends = {**kept, timed: time.monotonic() + seconds}
        event = ev.DeadlinePassed(timed[0], timed[2]) if buffered else ev.DeadlinePassed()
        self._control.set_timer(seconds, event, alone=not buffered)

    def resume(self, left: Mapping[Attempt, float | None]) -> None:
        """Start again after a restart. left: the attempts that go on, with the time left as the ledger has it."""
        whole = self._control.config.round.deadline_s
        for attempt, seconds in left.items():
            self.start(time_after_restart(self._context, whole, seconds), attempt)

    async def save(self) -> None:
        """Write the time left."""
        left = {timed[:3]: self._left(self._ends[timed]) for timed in self._open if timed in self._ends}
        if left:
            context = self._context
            with time_left_written(context):
                await context.services.ledger.do(context.store.set_seconds_left, context.run_id, left)

    @property
    def _attempt_under_way(self) -> _Timed:
        state = self._control.state
        phase = Phase.COLLECTING if state.policy.buffered else state.phase
        return state.round, state.exchange, state.attempt, phase

    @property
    def _open(self) -> set[_Timed]:
        """The attempts whose time runs."""
        state = self._control.state
        if state.policy.buffered:
            draws = {(work.version, work.attempt) for work in state.work.values() if not work.late}
            return {(version, 0, attempt, Phase.COLLECTING) for version, attempt in draws}
        return {self._attempt_under_way} if state.phase is Phase.COLLECTING or state.staged else set()


def whole_time(control: RunControl) -> float:
    """Seconds that the attempt under way has, or its stage of secure aggregation."""
    state = control.state
    return state.policy.stage_s if state.staged else control.config.round.deadline_s


def time_after_restart(context: RunContext, whole: float, left: float | None) -> float:
    """Seconds left after a restart: at least so many that clients can attach again and deliver.

    left: as the ledger has it; None before the first write, which gives the whole time.
    """
    grace = min(whole, context.services.config.limits.reattach_grace_s)
    return whole if left is None else max(left, grace)


@contextmanager
def time_left_written(context: RunContext) -> Iterator[None]:
    """A time left is written, without retries. If that fails, the older and longer time in the ledger stays."""
    try:
        yield
    except StoreError as error:
        log.warning("time_left_not_written", run=context.run_id, error=str(error))


async def count_wall_time(control: RunControl) -> None:
    """Report the time that a run with a limit has used, without that of pauses."""
    began = time.monotonic()
    while control.state.wall_time_s and not control.ended:
        await asyncio.sleep(min(1.0, max(0.01, control.state.wall_time_s - control.state.elapsed_s)))
        async with control.turn:
            now = time.monotonic()
            used = 0.0 if control.state.paused else now - began
            began, event = now, ev.TimeUsed(control.state.elapsed_s + used)
            if control.applies(event):
                await control.take(event)


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
