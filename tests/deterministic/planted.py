"""Planted faults: small mutations of the core and of its driver, each of which the simulation must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from fl_server.rounds import collecting, committing, effects, events, restoring, selecting
from fl_server.rounds import state as states
from fl_server.rounds.by_client import ByClient
from fl_server.rounds.machine import RULES
from fl_server.rounds.state import Phase, RoundState
from tests.deterministic.core_driver import DEADLINE_S, Driver

Patch = tuple[Any, str, Any]
"""(module or class, name, what stands in its place)."""


def _quorum_of_one() -> Patch:
    return RoundState, "quorum", property(lambda state: 1)


def _close_accepts_all() -> Patch:
    def close(state: RoundState) -> Any:
        return _CLOSE(replace(state, goal=len(state.admitted)))

    return collecting, "close", close


def _close_in_order_of_arrival() -> Patch:
    def close(state: RoundState) -> Any:
        closed, (first, *more) = _CLOSE(state)
        accepted = tuple(state.admitted[: state.goal])
        changed: Any = first
        return replace(closed, accepted=accepted), (replace(changed, accepted=accepted), *more)

    return collecting, "close", close


def _refusals_do_not_stand() -> Patch:
    def undecided(state: RoundState, place: tuple[int, int], client: str) -> bool:
        return state.collects and place == (state.round, state.exchange) and not state.arrivals.has(client)

    return RoundState, "undecided", undecided


def _redraw_keeps_updates() -> Patch:
    return selecting, "redraw", lambda state: replace(_REDRAW(state), admitted=state.admitted)


def _refusals_stand_for_ever() -> Patch:
    return committing, "next_round", lambda state: replace(_NEXT_ROUND(state), refused=state.refused)


def _epoch_stays() -> Patch:
    def reset(state: RoundState, why: str) -> Any:
        after, restart = _RESET(state, why)
        return replace(after, state_epoch=state.state_epoch), replace(restart, state_epoch=state.state_epoch)

    return selecting, "reset_states", reset


def _lost_states_stay() -> Patch:
    def reset(state: RoundState, why: str) -> Any:
        after, restart = _RESET(state, why)
        return replace(after, lost=state.lost), restart

    return selecting, "reset_states", reset


def _restored(**changes: Any) -> Callable[[], Patch]:
    def planted() -> Patch:
        return restoring, "restored_round", lambda state, saved: _RESTORED(state, replace(saved, **changes))

    return planted


def _population_ignored() -> Patch:
    return states, "within_population", lambda eligible, members, population: tuple(eligible)


def _not_judged() -> Patch:
    return committing, "_judged", lambda state, event, round: state


def _not_awaited() -> Patch:
    return committing, "awaited_evaluations", lambda state, round: frozenset()


def _draws_in_a_pause() -> Patch:
    return committing, "select", lambda state: _SELECT(replace(state, paused=False))


def _no_retry() -> Patch:
    def wait(state: RoundState, waits: effects.AwaitClients) -> Any:
        after, found = _WAIT(state, waits)
        return after, tuple(each for each in found if not isinstance(each, effects.RetryLater))

    return selecting, "wait_for_clients", wait


def _no_members() -> Patch:
    def committed(state: RoundState, event: events.ModelCommitted) -> Any:
        after, found = _COMMITTED(state, event)
        return replace(after, members=state.members), found

    return RULES, (Phase.COMMITTING, events.ModelCommitted), committed  # type: ignore[return-value]


def _next_exchange_keeps_updates() -> Patch:
    def reduced(state: RoundState, event: events.ExchangeReduced) -> Any:
        after, found = _NEXT_EXCHANGE(state, event)
        kept = () if after.phase is not Phase.COLLECTING else state.admitted[:1]
        return replace(after, admitted=kept), found

    return RULES, (Phase.REDUCING, events.ExchangeReduced), reduced  # type: ignore[return-value]


def _culprits_stay() -> Patch:
    def drop(state: RoundState, event: events.CulpritsFound) -> Any:
        after, found = _DROP(state, event)
        return replace(after, admitted=state.admitted), found

    return RULES, (Phase.STEPPING, events.CulpritsFound), drop  # type: ignore[return-value]


def _deadline_without_quorum() -> Patch:
    def passed(state: RoundState, event: events.DeadlinePassed) -> Any:
        return _CLOSE(state) if state.admitted and not state.fixed else _DEADLINE(state, event)

    return RULES, (Phase.COLLECTING, events.DeadlinePassed), passed  # type: ignore[return-value]


def _goal_shrinks_at_restart() -> Patch:
    def restored(state: RoundState, saved: restoring.SavedRound) -> RoundState:
        after = _RESTORED(state, saved)
        return replace(after, goal=len(after.fixed)) if after.fixed else after

    return restoring, "restored_round", restored


def _ends_a_round_early() -> Patch:
    return committing, "go_on", lambda state: _GO_ON(replace(state, rounds=state.rounds - 1))


def _nobody_works() -> Patch:
    return collecting, "next_attempt", lambda state, again=frozenset(): (state, ())


def _strangers_count() -> Patch:
    def not_wanted(state: RoundState, place: tuple[int, int], client: str) -> str:
        return "" if state.collects and place == (state.round, state.exchange) else "late"

    return RoundState, "not_wanted", not_wanted


def _step_of_another_list() -> Patch:
    def close(state: RoundState) -> Any:
        closed, (first, *more) = _CLOSE(state)
        changed: Any = first
        return closed, (replace(changed, accepted=closed.accepted[:-1]), *more)

    return collecting, "close", close


def _announced_before_committed() -> Patch:
    def stepped(state: RoundState, event: events.StepComputed) -> Any:
        after, found = _STEPPED(state, event)
        return after, (*found, effects.Announce(state.round, evaluate=False))

    return RULES, (Phase.STEPPING, events.StepComputed), stepped  # type: ignore[return-value]


def _not_awaited_after_restart() -> Patch:
    return restoring, "awaited_evaluations", lambda state, round: frozenset()


def _late_updates_count() -> Patch:
    def admit(driver: Driver, client: str, place: tuple[int, int], made: bytes) -> Iterator[str]:
        return _ADMIT(driver, client, (driver.state.round, driver.state.exchange), made)

    return Driver, "admit", admit


def _driver(**changes: Any) -> Callable[[], Patch]:
    name, value = next(iter(changes.items()))
    return lambda: (Driver, name, value)


def _deadline_goes_on() -> Patch:
    def left(driver: Driver) -> float:
        return max(0.0, driver.told.opened + DEADLINE_S - driver.clock.now)

    return Driver, "time_left", left


def _no_deadline() -> Patch:
    act = Driver.act
    return Driver, "act", lambda self, effect: None if isinstance(effect, effects.OpenAttempt) else act(self, effect)


_CLOSE, _DEADLINE, _DROP, _NEXT_EXCHANGE = (
    collecting.close, collecting.deadline, collecting.drop_culprits, collecting.next_exchange,
)  # fmt: skip
_REDRAW, _NEXT_ROUND, _RESET, _WAIT, _SELECT = (
    selecting.redraw, selecting.next_round, selecting.reset_states, selecting.wait_for_clients, selecting.select,
)  # fmt: skip
_RESTORED, _COMMITTED = restoring.restored_round, committing.committed
_GO_ON, _STEPPED, _ADMIT = committing.go_on, committing.stepped, Driver.admit

PLANTED: dict[str, Callable[[], Patch]] = {
    "one update is a quorum": _quorum_of_one,
    "a deadline closes a round below its quorum": _deadline_without_quorum,
    "more updates than the goal are accepted": _close_accepts_all,
    "the accepted list is in order of arrival": _close_in_order_of_arrival,
    "a refused client may deliver again": _refusals_do_not_stand,
    "a redrawn round keeps its updates": _redraw_keeps_updates,
    "refusals last for more than a round": _refusals_stand_for_ever,
    "a reset of states stays in its epoch": _epoch_stays,
    "lost states are kept after the reset": _lost_states_stay,
    "a restart forgets refusals": _restored(refused=ByClient()),
    "a restart forgets failures": _restored(failed=ByClient()),
    "a restart forgets the fixed list": _restored(fixed=None),
    "a restart lowers the goal to the fixed list": _goal_shrinks_at_restart,
    "a restart forgets admitted updates": _restored(admitted=()),
    "a restart forgets how often a daemon was started": _restored(restarts={}),
    "a restart does not wait for an evaluation": _not_awaited_after_restart,
    "a round in which nobody works stays open": _nobody_works,
    "an update of a client that is not in the cohort counts": _strangers_count,
    "an update of an earlier round counts": _late_updates_count,
    "a step is computed from another list than the accepted one": _step_of_another_list,
    "a round is announced before it is committed": _announced_before_committed,
    "a run ends a round early": _ends_a_round_early,
    "the population has no limit": _population_ignored,
    "evaluations are not judged": _not_judged,
    "no evaluation is awaited": _not_awaited,
    "a pause does not stop new rounds": _draws_in_a_pause,
    "a run that waits for clients never tries again": _no_retry,
    "clients do not join the population": _no_members,
    "the next exchange begins with an update of the last": _next_exchange_keeps_updates,
    "a culprit stays among the updates": _culprits_stay,
    "work is sent before its cohort is written": _driver(order=("send", "write", "act")),
    "an update is acknowledged before it is written": _driver(order_of_uploads=("acknowledge", "write")),
    "an attempt has no deadline": _no_deadline,
    "a deadline goes on while the coordinator is down": _deadline_goes_on,
}

FOUND_BY = {
    "a deadline closes a round below its quorum": 14,
    "more updates than the goal are accepted": 15,
    "a refused client may deliver again": 19,
    "a redrawn round keeps its updates": 19,
    "lost states are kept after the reset": 19,
    "a restart forgets refusals": 10,
    "a restart lowers the goal to the fixed list": 23,
    "no evaluation is awaited": 486,
    "a pause does not stop new rounds": 30,
    "a run that waits for clients never tries again": 39,
    "a restart does not wait for an evaluation": 17,
    "an update of a client that is not in the cohort counts": 132,
    "clients do not join the population": 16,
}
"""The first seed that finds a fault, where it is over 9."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The core or its driver with one of the faults."""
    owner, attribute, replacement = PLANTED[name]()
    if isinstance(owner, dict):
        with mock.patch.dict(owner, {attribute: replacement}):
            yield
    else:
        with mock.patch.object(owner, attribute, replacement):
            yield
