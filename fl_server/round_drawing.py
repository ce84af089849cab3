"""Drawing: who is asked in a round, who replaces whom, and how a round is drawn anew. One part of `rounds.py`."""

from __future__ import annotations

import math
from dataclasses import replace

from fl_server.events import AwaitClients, Cancel, Command, OpenAttempt, RestartRound, RetryLater, StatesLost
from fl_server.round_rule import Result
from fl_server.round_state import Phase, RoundPolicy, RoundState
from fl_server.sampling import Draw, by_id, draw_bernoulli, draw_fixed


def select(state: RoundState) -> Result:
    """Draw if the run may and can; else stay in SELECTING and say what is missing. A pause holds no open round up."""
    if not state.settled or (state.paused and not state.goal):
        return state, ()
    if state.goal:
        return draw_replacements(state)
    policy, candidates = state.policy, state.candidates
    if len(candidates) < policy.min_clients:
        return state, (AwaitClients(policy.min_clients, len(candidates)),)
    draw = Draw(policy.seed, state.round, state.attempt)
    if policy.sampling == "bernoulli":
        cohort = draw_bernoulli(candidates, policy.rate, draw)
    else:
        cohort = draw_fixed(candidates, _cohort_size(state, policy.clients_per_round), draw)
    state = replace(state, phase=Phase.COLLECTING, goal=goal_of(policy, cohort), drawn=frozenset(cohort))
    return state, (OpenAttempt(state.round, state.exchange, state.attempt, cohort),)


def goal_of(policy: RoundPolicy, cohort: tuple[str, ...]) -> int:
    """Updates wanted in a round whose first attempt drew this cohort."""
    return len(cohort) if policy.sampling == "bernoulli" else min(policy.clients_per_round, len(cohort))


def _cohort_size(state: RoundState, wanted: int) -> int:
    # 50 * 1.1 is 55.00000000000001 in floating point, and means 55.
    return math.ceil(round(wanted * state.draws_per_update, 6))


def draw_replacements(state: RoundState) -> Result:
    """The next attempt of a round below quorum: what was admitted stays, stragglers go on, replacements are drawn."""
    pool = set(state.candidates) - state.drawn if state.settled else set()
    missing = state.goal - len(state.admitted)
    cohort = draw_fixed(pool, _cohort_size(state, missing), Draw(state.policy.seed, state.round, state.attempt))
    if not cohort and not state.outstanding:
        waiting = replace(state, phase=Phase.SELECTING)
        return waiting, (AwaitClients(missing, len(pool)), RetryLater())
    state = replace(state, phase=Phase.COLLECTING, drawn=state.drawn | set(cohort))
    return state, (OpenAttempt(state.round, state.exchange, state.attempt, cohort),)


def next_round(state: RoundState) -> RoundState:
    """Nothing is drawn yet."""
    return replace(
        state, round=state.round + 1, attempt=0, first_attempt=0, exchange=0, phase=Phase.SELECTING, goal=0,
        drawn=frozenset(), out=frozenset(), admitted=(), accepted=(), fixed=(), repeated=False,
    )  # fmt: skip


def anew(state: RoundState) -> RoundState:
    """The same round with nothing drawn, as another attempt."""
    attempt = state.attempt + 1
    return replace(next_round(state), round=state.round, attempt=attempt, first_attempt=attempt)


def cancel(state: RoundState) -> tuple[Command, ...]:
    """Who still works is told to stop."""
    return (Cancel(by_id(state.outstanding), state.exchange),) if state.outstanding else ()


def restart_round(state: RoundState, why: str = "", *, states: bool = False) -> Result:
    """Give up what the round's exchanges collected and draw it anew."""
    why = why or f"exchange {state.exchange} had {len(state.admitted)} of the {state.quorum} updates that it needs"
    told = cancel(state)
    restart = RestartRound(state.round, why, states)
    state, commands = select(anew(replace(state, members=frozenset()) if states else state))
    return state, (restart, *told, *commands)


def restart_states(state: RoundState, event: StatesLost) -> Result:
    """A round under way was trained from states that mean nothing any more: it is given up too."""
    return restart_round(state, event.why, states=True) if state.goal else restart_states_alone(state, event)


def restart_states_alone(state: RoundState, event: StatesLost) -> Result:
    """No round is under way, or the run has ended and is going to be extended."""
    return replace(state, members=frozenset()), (RestartRound(state.round, event.why, states=True),)


def restart_states_later(state: RoundState, event: StatesLost) -> Result:
    """What the step under way was made from was right when it was made; it is finished and committed first."""
    return replace(state, states_lost=event.why), ()
