"""Planted faults of rounds with secure aggregation, in the core and its driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fl_server.rounds import effects, events, restoring, secure, selecting
from fl_server.rounds.events import Graph
from fl_server.rounds.machine import RULES
from fl_server.rounds.state import Phase, RoundState
from tests.deterministic import core_stages
from tests.deterministic.core_driver import Driver

Patch = tuple[Any, Any, Any]


def _draws_are_not_counted() -> Patch:
    return core_stages, "forget", lambda ledger, round_, past_draws: _FORGET(ledger, round_, 0)


def _message_of_those_here() -> Patch:
    def under_way(ledger: Any, state: RoundState) -> Any:
        if (stage := _UNDER_WAY(ledger, state)) is None:
            return None
        return stage._replace(members=tuple(client for client in stage.members if client not in state.out))

    return core_stages, "under_way", under_way


def _second_list() -> Patch:
    def deadline(state: RoundState, event: events.DeadlinePassed) -> Any:
        if not state.answered:
            return _DEADLINE(state, event)
        signed = tuple(entry for entry in state.accepted if entry[0] in state.answered)
        return secure.begin_signing(replace(state, accepted=signed, admitted=signed))

    return RULES, (Phase.SIGNING, events.DeadlinePassed), deadline


def _sum_without_one() -> Patch:
    return secure, "ComputeStep", lambda accepted, *rest: effects.ComputeStep(accepted[:-1], *rest)


def _opened_by_too_few() -> Patch:
    return Graph, "opens_all", lambda graph, clients, openers: True


def _abandoned_round_keeps_updates() -> Patch:
    return secure, "redraw", lambda state: replace(_REDRAW(state), admitted=state.admitted)


def _saved(**changes: Any) -> Callable[[], Patch]:
    """A restart finds something else in the ledger."""
    return lambda: (restoring, "restored_round", lambda state, saved: _RESTORED(state, replace(saved, **changes)))


def _sharers_are_forgotten() -> Patch:
    return restoring, "restored_round", lambda state, saved: replace(_RESTORED(state, saved), sharers=frozenset())


def _time_of_the_stage_before() -> Patch:
    def gives(driver: Driver, seconds: float) -> None:
        left = driver.ledger.seconds_left
        _GIVES(driver, seconds)
        if driver.state.staged or driver.state.phase is Phase.COLLECTING:
            driver.ledger.seconds_left = left

    return Driver, "_gives", gives


_FORGET, _UNDER_WAY, _GIVES = core_stages.forget, core_stages.under_way, Driver._gives
_DEADLINE, _REDRAW, _RESTORED = RULES[Phase.SIGNING, events.DeadlinePassed], selecting.redraw, restoring.restored_round

STAGES: dict[str, Callable[[], Patch]] = {
    "draws of a round are not counted": _draws_are_not_counted,
    "a repeated message leaves out who has gone": _message_of_those_here,
    "a list that too few signed is followed by another": _second_list,
    "a sum leaves out a survivor": _sum_without_one,
    "a mask is opened by too few": _opened_by_too_few,
    "an abandoned round keeps its updates": _abandoned_round_keeps_updates,
    "a restart forgets the graph of shares": _saved(graph=None),
    "a restart forgets answers to stages": _saved(answered=frozenset()),
    "a restart forgets who has shared": _sharers_are_forgotten,
    "a stage begins with the time of the one before": _time_of_the_stage_before,
}
