"""Why a run waits for clients, and which clients it awaits, as operators see it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fl_server.clients.draw_rules import counted, described, labels_text, policy_rule
from fl_server.rounds.state import Phase
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.deadline import Deadline
from fl_server.run.evaluation.clients import ClientEvaluations


def why_waiting(context: RunContext, control: RunControl) -> str:
    """The waiting reason, and the present clients that could be drawn if somebody did something, with what to do."""
    selection = control.eligible.in_round(control.state)
    rules = control.eligible.not_drawn(context.fleet.present(), selection)
    reasons = (described(rule, selection, clients) for rule, clients in rules.items() if rule.operable)
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
    """Until their deadline; None if none is running."""


def awaited(control: RunControl, deadline: Deadline, evaluations: ClientEvaluations) -> Awaited:
    """The clients that the run waits for: of the cohort while it collects, else those that evaluate its model."""
    state = control.state
    if state.phase is Phase.COLLECTING:
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
    here, task, labels = context.fleet.present(), context.task["name"], control.config.labels
    if not here:
        return f"clients: none is here{_away(context, control)}"
    selection = control.eligible.in_round(control.state)
    rules = {rule.reason: (rule, clients) for rule, clients in control.eligible.not_drawn(here, selection).items()}
    _, elsewhere = rules.pop("task", (None, []))
    offering = len(here) - len(elsewhere)
    if not offering:
        offers = sorted({str(offer["name"]) for client in elsewhere for offer in client.record.tasks})
        more = ", ..." if len(offers) > _OFFERS_SHOWN else ""
        offered = f"; offered: {', '.join(map(repr, offers[:_OFFERS_SHOWN]))}{more}" if offers else ""
        return f"clients with the task {task!r}: 0 of {len(here)} here offer it{offered}"
    if "labels" in rules and len(rules["labels"][1]) == offering:
        return f"clients with the labels {labels_text(labels)}: 0 of {offering} here with the task {task!r} have them"
    state = control.state
    wanted = state.goal - len(state.admitted) if state.goal else state.policy.min_clients
    able = offering - sum(len(clients) for _, clients in rules.values())
    others = "".join(f"; {counted(rule, selection, clients)}" for rule, clients in rules.values())
    return f"clients that could be drawn: {able} of {wanted} here{others}"


_OFFERS_SHOWN = 5


def _away(context: RunContext, control: RunControl) -> str:
    """The registered clients that the run could draw if they were here."""
    selection, records = control.eligible.selection(), context.fleet.records.in_memory()
    rules = control.eligible.not_drawn(records, selection)
    away = next((clients for rule, clients in rules.items() if rule.reason == "lost"), [])
    return f"; {len(away)} with the task and labels away, first {away[0].record.client_id}" if away else ""
