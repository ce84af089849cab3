"""A run as operators see it: why it waits and for whom, and the clients of its round."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from fl_server.clients.draw_rules import Candidate, Rule, policy_rule
from fl_server.rounds.state import Phase, RoundState
from fl_server.run.client_evaluations import ClientEvaluations
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.eligible import counted, described, labels_text
from fl_server.run.failures import Deadline
from fl_server.run.round_statistics import ClientTransfer, ClientTransfers

_OFFERS_SHOWN = 5
_OUT, _TRANSFERS = "out", ("downloading", "uploading")
_CUT = "the transfer was cut; the client goes on with it"
_UNKNOWN = "it fetched nothing since the coordinator started; it trains if it held the model before"


def why_waiting(context: RunContext, control: RunControl) -> str:
    """The waiting reason with its numbers: what no client here has, and what operators can do about the others."""
    selection = control.eligible.in_round(control.state)
    rules = control.eligible.not_drawn(context.fleet.attendance.roster.present(), selection)
    reasons = [described(rule, selection, clients) for rule, clients in rules.items() if rule.operable]
    if nobody_has := _nobody_has(context, control, rules):
        reasons.insert(0, f"it lacks {nobody_has}")
    return "; ".join((control.run_status.waiting_reason, *reasons))


def policy_refusals(context: RunContext) -> Counter[str]:
    """How many clients refuse to train for the run by the policy of their site, by rule."""
    return Counter(policy_rule(why) for why in context.fleet.eligibility.policy.of(context.run_id).values())


@dataclass(frozen=True, slots=True)
class Awaited:
    """The clients that the current phase of a run waits for."""

    clients: frozenset[str] = frozenset()
    """Those that have not delivered and may still do so."""
    seconds_left: float | None = None
    """Seconds until their deadline; None if none is running."""


def awaited(control: RunControl, deadline: Deadline, evaluations: ClientEvaluations) -> Awaited:
    """The clients that the run waits for: of the cohort while it collects, else those that evaluate its model."""
    state = control.state
    if state.staged:
        return Awaited(state.unanswered, deadline.seconds_left if deadline.started else None)
    if state.phase is Phase.COLLECTING or (state.policy.buffered and state.working):
        return Awaited(state.outstanding, deadline.seconds_left if deadline.started else None)
    if state.phase is Phase.EVALUATING and "clients" in state.awaited:
        return Awaited(*evaluations.outstanding(state.round - 1))
    return Awaited()


def lacking(context: RunContext, control: RunControl) -> str:
    """What a run that waits for clients lacks, as a noun phrase with its reason; empty if it lacks none.

    The first of these that holds: clients, clients with the task, clients with the labels, more clients.
    """
    if control.ended or control.run_status.write_failure or not control.run_status.waiting_reason:
        return ""
    here, selection = context.fleet.attendance.roster.present(), control.eligible.in_round(control.state)
    rules = control.eligible.not_drawn(here, selection)
    if nobody_has := _nobody_has(context, control, rules):
        return nobody_has
    others = {rule: clients for rule, clients in rules.items() if rule.reason != "task"}
    state = control.state
    wanted = state.goal - state.collected if state.goal else state.policy.min_clients
    able = len(here) - sum(map(len, rules.values()))
    counts = "".join(f"; {counted(rule, selection, clients)}" for rule, clients in others.items())
    return f"clients that could be drawn: {able} of {wanted} here{counts}"


def _nobody_has(context: RunContext, control: RunControl, rules: Mapping[Rule, Sequence[Candidate]]) -> str:
    """What no client here has, with numbers; empty if some client has all. rules: why clients here are not drawn."""
    here, task, labels = context.fleet.attendance.roster.present(), context.task["name"], control.config.labels
    if not here:
        return f"clients: none is here{_away(context, control)}"
    by_reason = {rule.reason: clients for rule, clients in rules.items()}
    elsewhere = by_reason.get("task", [])
    offering = len(here) - len(elsewhere)
    if not offering:
        offers = sorted({str(offer["name"]) for client in elsewhere for offer in client.record.tasks})
        more = ", ..." if len(offers) > _OFFERS_SHOWN else ""
        offered = f"; offered: {', '.join(map(repr, offers[:_OFFERS_SHOWN]))}{more}" if offers else ""
        return f"clients with the task {task!r}: 0 of {len(here)} here offer it{offered}"
    if len(by_reason.get("labels", [])) == offering:
        return f"clients with the labels {labels_text(labels)}: 0 of {offering} here with the task {task!r} have them"
    return ""


def _away(context: RunContext, control: RunControl) -> str:
    """The registered clients that the run could draw if they were here."""
    selection, records = control.eligible.selection(), context.fleet.records.in_memory()
    rules = control.eligible.not_drawn(records, selection)
    away = next((clients for rule, clients in rules.items() if rule.reason == "lost"), [])
    return f"; {len(away)} with the task and labels away, first {away[0].record.client_id}" if away else ""


@dataclass(frozen=True, slots=True)
class Member:
    """One client of the cohort."""

    client: str
    phase: str
    transfer: ClientTransfer | None = None
    """The transfer under way, or the one that ended with the phase before."""
    detail: str = ""

    @property
    def moving(self) -> bool:
        """Whether bytes are moved in this phase."""
        return self.transfer is not None and self.phase in _TRANSFERS

    @property
    def seconds(self) -> float | None:
        """Since the phase began; None if that is unknown."""
        known = self.transfer is not None and self.phase in {*_TRANSFERS, "training", "checking"}
        return time.monotonic() - self.transfer.changed if self.transfer is not None and known else None


def members(
    state: RoundState, transfers: ClientTransfers, equipped: AbstractSet[str], clients: Iterable[str]
) -> list[Member]:
    """These clients of the cohort, in the order given. equipped: all resources of the exchange went out to them."""
    return [_member(state, transfers, equipped, client) for client in clients]


def drawn(state: RoundState) -> list[str]:
    """The clients of the exchange under way, in the order of id; none between rounds and after the end."""
    return [] if state.phase is Phase.ENDED else sorted(state.drawn)


def by_phase(state: RoundState, transfers: ClientTransfers, equipped: AbstractSet[str]) -> Counter[str]:
    """The number of clients in each phase."""
    return Counter(member.phase for member in members(state, transfers, equipped, drawn(state)))


def _member(state: RoundState, transfers: ClientTransfers, equipped: AbstractSet[str], client: str) -> Member:
    transfer = transfers.newest.get(client)
    if state.arrivals.has(client):
        return Member(client, "delivered", transfer)
    if client in state.out:
        phase, why = transfers.outs.get(client, (_OUT, ""))
        return Member(client, phase, None, why)
    if transfer is not None and transfer.direction == "up":
        return _in_transfer(client, "uploading", "checking", transfer)
    if client in equipped and not (transfer is not None and transfer.open):
        return Member(client, "training", transfer)
    if transfer is not None:
        return _in_transfer(client, "downloading", "downloading", transfer)
    return Member(client, "assigned", None, _UNKNOWN if client in transfers.unknown else "")


def _in_transfer(client: str, phase: str, after: str, transfer: ClientTransfer) -> Member:
    """A client that moves bytes, or has moved all of this transfer."""
    if transfer.done >= transfer.size:
        return Member(client, after, transfer)
    return Member(client, phase, transfer, "" if transfer.open else _CUT)
