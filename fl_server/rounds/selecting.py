"""Rules of the selecting phase: drawing a cohort, drawing replacements, and redrawing a round."""

from __future__ import annotations

import math
from dataclasses import replace

from fl_server.rounds.events import (
    AwaitClients,
    Cancel,
    Command,
    OpenAttempt,
    RestartRound,
    RetryLater,
    StatesLost,
)
from fl_server.rounds.sampling import Draw, by_id, draw_bernoulli, draw_fixed
from fl_server.rounds.state import Phase, Result, RoundPolicy, RoundState


def select(state: RoundState) -> Result:
    """Draw a cohort if possible; else stay in SELECTING and report what is missing. A pause stops no open round."""
    if not state.settled or (state.paused and not state.goal):
        return state, ()
    if state.goal:
        return draw_replacements(state)
    policy, candidates = state.policy, state.candidates
    if not state.enough:
        return state, (AwaitClients(policy.min_clients, len(candidates)),)
    draw = Draw(policy.seed, state.round, state.attempt)
    if policy.sampling == "bernoulli":
        cohort = draw_bernoulli(candidates, policy.rate, draw, policy.min_accepted)
    else:
        cohort = draw_fixed(candidates, _cohort_size(state, policy.clients_per_round), draw)
    state = replace(state, phase=Phase.COLLECTING, goal=goal_of(policy, cohort), drawn=frozenset(cohort))
    return state, (OpenAttempt(state.round, state.exchange, state.attempt, cohort),)


def goal_of(policy: RoundPolicy, cohort: tuple[str, ...]) -> int:
    """The goal of a round whose first attempt drew this cohort."""
    return len(cohort) if policy.sampling == "bernoulli" else min(policy.clients_per_round, len(cohort))


def _cohort_size(state: RoundState, wanted: int) -> int:
    # 50 * 1.1 is 55.00000000000001 in floating point; 55 is meant.
    return math.ceil(round(wanted * state.draws_per_update, 6))


def draw_replacements(state: RoundState) -> Result:
    """Open the next attempt: admitted updates stay, outstanding clients continue, replacements are drawn."""
    pool = set(state.candidates) - state.drawn if state.settled else set()
    missing = state.goal - len(state.admitted)
    cohort = draw_fixed(pool, _cohort_size(state, missing), Draw(state.policy.seed, state.round, state.attempt))
    if not cohort and not state.working:
        waiting = replace(state, phase=Phase.SELECTING)
        return waiting, (AwaitClients(missing, len(pool)), RetryLater())
    state = replace(state, phase=Phase.COLLECTING, drawn=state.drawn | set(cohort))
    return state, (OpenAttempt(state.round, state.exchange, state.attempt, cohort),)


def next_round(state: RoundState) -> RoundState:
    """The state before the first draw of the next round."""
    return replace(
        state, round=state.round + 1, attempt=0, first_attempt=0, exchange=0, phase=Phase.SELECTING, goal=0,
        drawn=frozenset(), out=frozenset(), failed=(), admitted=(), accepted=(), fixed=(), repeated=False,
    )  # fmt: skip


def redraw(state: RoundState) -> RoundState:
    """The state before another first draw of the same round, as a new attempt."""
    attempt = state.attempt + 1
    return replace(next_round(state), round=state.round, attempt=attempt, first_attempt=attempt)


def cancel(state: RoundState) -> tuple[Command, ...]:
    """The command that cancels the outstanding clients, if there are any."""
    return (Cancel(by_id(state.outstanding), state.exchange),) if state.working else ()


def restart_round(state: RoundState, why: str = "", *, states: bool = False) -> Result:
    """Discard what the round has collected, and redraw it."""
    why = why or f"exchange {state.exchange} had {len(state.admitted)} of the {state.quorum} updates that it needs"
    cancelled = cancel(state)
    restart = RestartRound(state.round, why, states)
    state, commands = select(redraw(replace(state, members=frozenset()) if states else state))
    return state, (restart, *cancelled, *commands)


def restart_states(state: RoundState, event: StatesLost) -> Result:
    """Reset the states. A round under way was trained from the old states, so it is redrawn."""
    return restart_round(state, event.why, states=True) if state.goal else restart_states_alone(state, event)


def restart_states_alone(state: RoundState, event: StatesLost) -> Result:
    """Reset the states when no round is under way, or after the end of a run, which may be extended."""
    return replace(state, members=frozenset()), (RestartRound(state.round, event.why, states=True),)


def restart_states_later(state: RoundState, event: StatesLost) -> Result:
    """Commit the step under way first: its updates were made from valid states."""
    return replace(state, states_lost=event.why), ()
