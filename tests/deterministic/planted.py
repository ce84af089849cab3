"""Planted faults: small mutations of the core and of its driver, each of which the simulation must find."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from fl_server.rounds import collecting, committing, effects, ending, events, machine, restoring, selecting
from fl_server.rounds import state as states
from fl_server.rounds.by_client import ByClient
from fl_server.rounds.machine import RULES
from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import Phase, RoundState
from tests.deterministic.core_driver import Driver
from tests.deterministic.core_effects import DEADLINE_S
from tests.deterministic.core_ledger import digest
from tests.deterministic.planted_buffer import BUFFER
from tests.deterministic.planted_stages import STAGES

Patch = tuple[Any, Any, Any]
"""(module, class or dictionary, name or key, what stands in its place)."""


def _redraw_is_not_counted() -> Patch:
    return selecting, "redraw", lambda state: replace(_REDRAW(state), draws=state.draws - 1)


def _budget_is_not_looked_at() -> Patch:
    draw = selecting._draw
    return selecting, "end_now", lambda state, event: draw(state)


def _private_rounds_wait() -> Patch:
    return RoundState, "quorum", property(lambda state: 1 if state.policy.private else _QUORUM(state))


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


def _saved(**changes: Any) -> Callable[[], Patch]:
    """A restart finds something else in the ledger."""
    return lambda: (restoring, "restored_round", lambda state, saved: _RESTORED(state, replace(saved, **changes)))


def _restored(**changes: Any) -> Callable[[], Patch]:
    """A restart has another state."""
    return lambda: (restoring, "restored_round", lambda state, saved: replace(_RESTORED(state, saved), **changes))


def _restored_from(change: Callable[[RoundState], dict[str, Any]]) -> Callable[[], Patch]:
    """The same, from what it should be."""

    def restored(state: RoundState, saved: restoring.SavedRound) -> RoundState:
        after = _RESTORED(state, saved)
        return replace(after, **change(after))

    return lambda: (restoring, "restored_round", restored)


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

    return RULES, (Phase.COMMITTING, events.ModelCommitted), committed


def _next_exchange_keeps_updates() -> Patch:
    def reduced(state: RoundState, event: events.ExchangeReduced) -> Any:
        after, found = _NEXT_EXCHANGE(state, event)
        kept = () if after.phase is not Phase.COLLECTING else state.admitted[:1]
        return replace(after, admitted=kept), found

    return RULES, (Phase.REDUCING, events.ExchangeReduced), reduced


def _culprits_stay() -> Patch:
    def drop(state: RoundState, event: events.CulpritsFound) -> Any:
        after, found = _DROP(state, event)
        return replace(after, admitted=state.admitted), found

    return RULES, (Phase.STEPPING, events.CulpritsFound), drop


def _deadline_without_quorum() -> Patch:
    def passed(state: RoundState, event: events.DeadlinePassed) -> Any:
        return _CLOSE(state) if state.admitted and not state.fixed else _DEADLINE(state, event)

    return RULES, (Phase.COLLECTING, events.DeadlinePassed), passed


def _goal_shrinks_at_restart() -> Patch:
    return _restored_from(lambda after: {"goal": len(after.fixed) or after.goal})()


def _round_drawn_anew() -> Patch:
    return restoring, "restored_round", lambda state, saved: state


def _replacements_forgotten() -> Patch:
    def restored(state: RoundState, saved: restoring.SavedRound) -> RoundState:
        after = _RESTORED(state, saved)
        return after if after.fixed or not saved.attempts else replace(after, drawn=frozenset(saved.attempts[0][2]))

    return restoring, "restored_round", restored


def _judged_from_the_start() -> Patch:
    def restored(*known: Any) -> RoundState:
        return replace(_WITH_EVALUATIONS(*known), judged_from=0)

    return restoring, "with_evaluations", restored


def ends_a_round_early() -> Patch:
    """Of the core, for both depths."""
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

    return RULES, (Phase.STEPPING, events.StepComputed), stepped


def _not_awaited_after_restart() -> Patch:
    return restoring, "awaited_evaluations", lambda state, round: frozenset()


def _skips_a_round() -> Patch:
    return committing, "next_round", lambda state: replace(_NEXT_ROUND(state), round=state.round + 2)


def _next_exchange_keeps_drop_outs() -> Patch:
    def reduced(state: RoundState, event: events.ExchangeReduced) -> Any:
        after, found = _NEXT_EXCHANGE(state, event)
        return replace(after, out=state.out), found

    return RULES, (Phase.REDUCING, events.ExchangeReduced), reduced


def _retry_forgets_cohort() -> Patch:
    def draw(state: RoundState, again: frozenset[str] = frozenset()) -> Any:
        after, found = _DRAW_REPLACEMENTS(state, again)
        return replace(after, drawn=after.drawn - set(after.arrivals.clients())), found

    return collecting, "draw_replacements", draw


def _drop_out_fails() -> Patch:
    def dropped(state: RoundState, event: events.ClientDroppedOut) -> Any:
        return ending.end_by_fault(state, ("task", f"{event.client} has gone"))

    return RULES, (Phase.COLLECTING, events.ClientDroppedOut), dropped


def _goal_of_one_more() -> Patch:
    return RoundPolicy, "goal_of", lambda policy, cohort: min(len(cohort), _GOAL_OF(policy, cohort) + 1)


def _other_digests() -> Patch:
    def close(state: RoundState) -> Any:
        return _CLOSE(replace(state, admitted=tuple((client, made[::-1]) for client, made in state.admitted)))

    return collecting, "close", close


def _sums_in_order_of_arrival() -> Patch:
    return Driver, "compute", lambda self: digest(self.ledger.model, tuple(self.state.admitted))


def _ends_no_run() -> Patch:
    return committing, "_verdict", lambda state, event, round: None


def last_round_not_evaluated() -> Patch:
    """Of the core, for both depths."""

    def due(state: RoundState, round: int) -> bool:
        return _EVALUATION_DUE(state, round) and round + 1 < state.rounds

    return committing, "evaluation_due", due


def _epoch_written_alone() -> Patch:
    def reset(state: RoundState, why: str) -> Any:
        after, restart = _RESET(state, why)
        return replace(after, state_epoch=state.state_epoch), restart

    return selecting, "reset_states", reset


def _stays_paused() -> Patch:
    def take(driver: Driver, event: events.Event) -> Iterator[str]:
        if not isinstance(event, events.ResumeRequested):
            return _TAKE(driver, event)
        driver.ledger.paused = True
        return iter(())

    return Driver, "take", take


def _any_number_of_processes() -> Patch:
    def restarted(state: RoundState, event: events.ClientRestarted) -> Any:
        counted = state.restarts.added(event.client, state.restarts.get(event.client, 0) + 1)
        return replace(state, restarts=counted), (effects.SendWork(event.client),)

    return RULES, (Phase.COLLECTING, events.ClientRestarted), restarted


def _outdated_events() -> Patch:
    return machine, "applies", lambda event, state: True


def _other_model_in_a_retry() -> Patch:
    def assign(self: Driver, client: str) -> None:
        _ASSIGN(self, client)
        if self.state.attempt and client in self.told.assigned:
            self.told.assigned[client] = (*self.told.assigned[client][:3], b"another")

    return Driver, "assign", assign


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
_WITH_EVALUATIONS, _EVALUATION_DUE = restoring.with_evaluations, committing.evaluation_due
_GO_ON, _STEPPED, _ADMIT, _ASSIGN = committing.go_on, committing.stepped, Driver.admit, Driver.assign
_TAKE = Driver.take
_QUORUM: Any = vars(RoundState)["quorum"].fget
_DRAW_REPLACEMENTS, _GOAL_OF = selecting.draw_replacements, RoundPolicy.goal_of

PLANTED: dict[str, Callable[[], Patch]] = {
    "a redraw is not counted": _redraw_is_not_counted,
    "a budget is not looked at": _budget_is_not_looked_at,
    "a private round waits for an update": _private_rounds_wait,
    "a restart forgets its draws": lambda: (Driver, "draws", lambda driver: 0),
    "one update is a quorum": lambda: (RoundState, "quorum", property(lambda state: 1)),
    "a deadline closes a round below its quorum": _deadline_without_quorum,
    "more updates than the goal are accepted": _close_accepts_all,
    "the accepted list is in order of arrival": _close_in_order_of_arrival,
    "a refused client may deliver again": _refusals_do_not_stand,
    "a redrawn round keeps its updates": _redraw_keeps_updates,
    "refusals last for more than a round": _refusals_stand_for_ever,
    "a reset of states stays in its epoch": _epoch_stays,
    "lost states are kept after the reset": _lost_states_stay,
    "a restart forgets refusals": _saved(refused=ByClient()),
    "a restart forgets failures": _saved(failed=ByClient()),
    "a restart forgets the fixed list": _saved(fixed=None),
    "a restart lowers the goal to the fixed list": _goal_shrinks_at_restart,
    "a restart forgets admitted updates": _saved(admitted=()),
    "a restart forgets how often a daemon was started": _saved(restarts={}),
    "a restart does not wait for an evaluation": _not_awaited_after_restart,
    "a round in which nobody works stays open": _nobody_works,
    "an update of a client that is not in the cohort counts": _strangers_count,
    "an update of an earlier round counts": _late_updates_count,
    "a step is computed from another list than the accepted one": _step_of_another_list,
    "a round is announced before it is committed": _announced_before_committed,
    "a run ends a round early": ends_a_round_early,
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
    "a commit skips a round": _skips_a_round,
    "the next exchange keeps the drop-outs of the last": _next_exchange_keeps_drop_outs,
    "a retry forgets who has delivered": _retry_forgets_cohort,
    "a client that drops out fails the run": _drop_out_fails,
    "a round has one update too many": _goal_of_one_more,
    "an accepted list has other digests than its updates": _other_digests,
    "a step sums its updates in the order of arrival": _sums_in_order_of_arrival,
    "an evaluation ends no run": _ends_no_run,
    "the last round is not evaluated": last_round_not_evaluated,
    "a reset of states is written and not kept": _epoch_written_alone,
    "a paused run stays paused": _stays_paused,
    "events that are out of date are not dropped": _outdated_events,
    "a daemon that restarts gets its work any number of times": _any_number_of_processes,
    "a later attempt trains another model": _other_model_in_a_retry,
    "a restart skips a round": _restored_from(lambda after: {"round": after.round + bool(after.round)}),
    "a restart begins with the first exchange": _restored(exchange=0),
    "a restart forgets the epoch of the states": _restored(state_epoch=0),
    "a restart forgets a pause": _restored(paused=False),
    "a restart forgets how long the epoch is": _restored(epoch_rounds=0),
    "a restart forgets who has lost a state": _restored(lost=ByClient()),
    "a restart forgets the population": _restored(members=frozenset()),
    "a restart forgets an extension": _restored(rounds=10),
    "a restart draws the round anew": _round_drawn_anew,
    "a restart counts attempts anew": _restored_from(lambda after: {"attempt": after.first_attempt}),
    "a restart forgets the replacements": _replacements_forgotten,
    "a restart judges from the start": _judged_from_the_start,
    "a restart loses one of the fixed list": _restored_from(lambda after: {"fixed": after.fixed[:-1]}),
    "a restart lowers the goal": _restored_from(lambda after: {"goal": max(0, after.goal - 1)}),
    "a deadline goes on while the coordinator is down": _deadline_goes_on,
}


PLANTED |= STAGES | BUFFER


def planted(name: str) -> AbstractContextManager[None]:
    """The core or its driver with one of the faults."""
    return patched(PLANTED[name]())


@contextmanager
def patched(patch: Patch) -> Iterator[None]:
    """The code with a patch. Raises TypeError if the replacement cannot be called as what it replaces."""
    owner, attribute, replacement = patch
    _require_same_call(owner[attribute] if isinstance(owner, dict) else getattr(owner, attribute), replacement)
    if isinstance(owner, dict):
        with mock.patch.dict(owner, {attribute: replacement}):
            yield
    else:
        with mock.patch.object(owner, attribute, replacement):
            yield


def _require_same_call(original: Any, replacement: Any) -> None:
    """A replacement that fails at its call would be another fault than the planted one."""
    if not inspect.isroutine(original):
        return
    by_name = {each.name for each in inspect.signature(original).parameters.values() if each.kind is each.KEYWORD_ONLY}
    places = [name for name in inspect.signature(original).parameters if name not in by_name]
    inspect.signature(replacement).bind(*places, **dict.fromkeys(by_name))
