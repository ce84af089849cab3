"""Which clients need attention, why, and the command that helps: the one rule for lists, page, metric and alert.

A client that an operator has banned or drained needs none: somebody has dealt with it. What is judged by the newest
work ends with better work, or when the client is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fl_common.units import counted, utc
from fl_server.clients.fleet import Fleet
from fl_server.run.client_warnings import absent
from fl_server.run.run import Run
from fl_server.runs.table import RunTable
from fl_server.settings.config import AttentionConfig
from fl_server.store.client_work import HIDDEN_RUN, ClientWork, End
from fl_server.store.records import QuarantineRecord


class Need(NamedTuple):
    """Why a client needs attention."""

    reason: str
    why: str
    """The reason in words, with numbers."""
    remedy: str
    run_id: str = ""
    """The run concerned; empty for none in particular."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What the rules of a client look at."""

    work: ClientWork
    attached: bool
    """Whether it is here, or may come back in a moment: only then its newest work is judged."""
    quarantine: QuarantineRecord | None
    contested: bool
    limits: AttentionConfig


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason; `why` returns an empty text where it does not hold. {client} and {run} of a remedy are names."""

    reason: str
    remedy: str
    why: Callable[[Subject], str]


def _contested(subject: Subject) -> str:
    return "two daemons use its identity" if subject.contested else ""


def _quarantined(subject: Subject) -> str:
    if (record := subject.quarantine) is None:
        return ""
    return f"in quarantine until {utc(record.until)}: {record.reason}"


def _often(end: End) -> Callable[[Subject], str]:
    """Its newest assignments often ended so."""

    def why(subject: Subject) -> str:
        work, newest = subject.work, len(subject.work.newest)
        number = work.of_newest()[end]
        fewest = subject.limits.assignments
        if not subject.attached or not fewest or number < max(fewest, subject.limits.share * newest):
            return ""
        last = {"failed": work.last_failure, "refused": work.last_refusal}.get(end)
        words = f"{end} {number} of its newest {newest} assignments"
        if last is None:
            return words
        where = f"run {last.run_id} round {last.round}"
        if last.run_id == HIDDEN_RUN:
            where = "a run with differential privacy"
        return f"{words}, the last in {where}: {last.message}"

    return why


def _slow(subject: Subject) -> str:
    work, limits = subject.work, subject.limits
    rounds, last = work.newest_rounds()
    if not subject.attached or not limits.rounds or rounds < limits.rounds or last < limits.last_share * rounds:
        return ""
    slowness = work.usual("slowness")
    if slowness is None or slowness < limits.slowness:
        return ""
    times = [
        f"{seconds:.3g} s of {what}"
        for what, seconds in (("work", work.usual("work_s")), ("transfer", work.usual("transfer_s")))
        if seconds is not None
    ]
    return (
        f"the last one in {last} of its newest {counted(rounds, 'round')}, with {slowness:.1f} times the time "
        "of the others"
        f" ({', '.join(times)})"
    )


_REPAIR = (
    "`fl clients show {client}` has its work; repair the device, or take it out with `fl clients drain {client}`;"
    " `fl clients release {client}` forgives its newest work"
)
OF_CLIENTS = (
    Rule("contested", "`fl clients show {client}` names both daemons: end one of them", _contested),
    Rule(
        "quarantined", "`fl clients show {client}` has the cause, `fl clients release {client}` ends it", _quarantined
    ),
    Rule("failing", _REPAIR, _often("failed")),
    Rule("refused", _REPAIR, _often("refused")),
    Rule("lost", _REPAIR, _often("lost")),
    Rule(
        "slow",
        '`fl clients drain {client}` goes on without it; a run with round.close = "goal" does not wait for the last',
        _slow,
    ),
)
URGENCY = (*(rule.reason for rule in OF_CLIENTS), "left_out", "labels", "missing", "below_due")
"""The reasons, the most urgent first; those that the rules of clients do not have are about a run."""


class ClientAttention:
    """Answers for all clients of a coordinator. Its values are read in place, so that a scraper's thread may ask."""

    def __init__(self, fleet: Fleet, table: RunTable, limits: AttentionConfig) -> None:
        self._fleet, self._table, self._limits = fleet, table, limits
        self._judged: dict[str, tuple[Subject, tuple[Need, ...]]] = {}
        """The last judgement of each client. A scrape asks for all of them, and few have new work since the last."""

    def of(self, client_id: str) -> list[Need]:
        """Why a client needs attention, the most urgent reason first; empty if it needs none."""
        record = self._fleet.records.find(client_id)
        if record is None or record.banned or record.draining:
            self._judged.pop(client_id, None)
            return []
        needs = [*self._of_client(client_id), *(need for run in self._runs() for need in _of_run(run, client_id))]
        return sorted(needs, key=lambda need: URGENCY.index(need.reason))

    def all(self) -> dict[str, list[Need]]:
        """All clients that need attention, the most urgent first, then in the order of id bytes."""
        needs = {client: found for client in list(self._fleet.records.in_memory()) if (found := self.of(client))}
        return dict(sorted(needs.items(), key=lambda item: (URGENCY.index(item[1][0].reason), item[0].encode())))

    def urgency(self, client_id: str) -> int:
        """0 for a client that needs no attention, and more for a more urgent one."""
        needs = self.of(client_id)
        return len(URGENCY) - URGENCY.index(needs[0].reason) if needs else 0

    def _runs(self) -> list[Run]:
        return [run for run in list(self._table.loaded.values()) if not run.ended]

    def _of_client(self, client_id: str) -> tuple[Need, ...]:
        fleet = self._fleet
        contest = fleet.contested.contest_of(client_id)
        attached, flapping = fleet.attendance.state(client_id) != "lost", contest is not None and contest.flapping
        work, quarantine = fleet.work.of(client_id), fleet.quarantine.of(client_id)
        subject = Subject(work, attached, quarantine, flapping, self._limits)
        known = self._judged.get(client_id)
        if known is None or known[0] != subject:
            reasons = ((rule, rule.why(subject)) for rule in OF_CLIENTS)
            needs = tuple(Need(rule.reason, why, rule.remedy.format(client=client_id)) for rule, why in reasons if why)
            known = self._judged[client_id] = subject, needs
        return known[1]


def _of_run(run: Run, client: str) -> Iterator[Need]:
    """What a run that has not ended knows of its clients."""
    show = f"`fl clients show {client}`"
    if client in run.client_states.left_out:
        why = f"left out of run {run.id} for lost client states"
        yield Need("left_out", why, f"`fl clients release {client}` lets it take part again", run.id)
    if client in run.context.label_order.suspected:
        why = f"its own accuracy in run {run.id} stays far below that of the others"
        yield Need("labels", why, f"check that it numbers the classes as the others do; {show} has its note", run.id)
    if client in run.client_states.missing:
        rounds = run.client_states.rounds_missed(run.rounds.committed).get(client, 0)
        why, _, remedy = absent(run.id, client, rounds).partition(": ")
        yield Need("missing", why, remedy, run.id)
    if (share := run.rounds.shares.too_low.get(client)) is not None:
        why = f"{counted(share.counted, 'counted update')} in run {run.id} of {share.due:.1f} that it is due"
        remedy = f'{show} has its latest work; close = "cohort" waits for slow clients'
        yield Need("below_due", why, remedy, run.id)
