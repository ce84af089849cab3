"""Rules for drawing a cohort and replacements, and for redrawing a round."""

from __future__ import annotations

import math

from fl_server.rounds.buffer import carried_over, collect, open_round, without_version
from fl_server.rounds.by_client import ByClient, Lost
from fl_server.rounds.effects import AwaitClients, ComputeStep, OpenAttempt, RestartRound, RetryLater
from fl_server.rounds.ending import cancel, end_by_fault, end_now, no_client_delivers
from fl_server.rounds.events import ClientReleased, EndRequested, StatesLost, counted
from fl_server.rounds.sampling import Draw, adapted, draw_fixed
from fl_server.rounds.state import Phase, Result, RoundState, replace


def select(state: RoundState) -> Result:
    """Draw a cohort if possible; else stay in SELECTING and report what is missing. A pause stops no open round."""
    if not state.settled or state.resting or (state.paused and not state.goal):
        return state, ()
    if state.policy.buffered:
        return collect(state) if state.goal else open_round(state)
    if state.goal:
        return draw_replacements(state)
    policy, candidates = state.policy, state.candidates
    if not state.enough:
        waits = AwaitClients(policy.min_clients, len(candidates))
        state, effects = restart_round(state, lost_states(state), states=True) if restart_helps(state) else (state, ())
        return state, (waits, *effects)
    if 0 < policy.most_draws <= state.draws:
        return end_now(state, EndRequested("completed", f"its privacy budget allows {policy.most_draws} draws"))
    return _draw(state)


def _draw(state: RoundState) -> Result:
    """Draw the first cohort of a round."""
    policy, candidates = state.policy, state.candidates
    size = _cohort_size(state, policy.clients_per_round)
    cohort = policy.cohort(candidates, size, Draw(policy.seed, state.round, state.attempt))
    phase = Phase.AGREEING if policy.secure else Phase.COLLECTING
    state = replace(state, phase=phase, goal=policy.goal_of(cohort), drawn=frozenset(cohort), draws=state.draws + 1)
    opened = OpenAttempt(state.round, state.exchange, state.attempt, cohort)
    if cohort:
        return state, (opened,)
    return replace(state, phase=Phase.STEPPING, accepted=()), (opened, ComputeStep(()))  # a private round


def _cohort_size(state: RoundState, wanted: int) -> int:
    # 50 * 1.1 is 55.00000000000001 in floating point; 55 is meant.
    return math.ceil(round(wanted * state.draws_per_update, 6))


def draw_replacements(state: RoundState, again: frozenset[str] = frozenset()) -> Result:
    """Open the next attempt: admitted updates stay, outstanding clients continue, replacements are drawn.

    again: clients of the cohort that may be drawn once more. The others of them stay in the cohort: they may still
    deliver.
    """
    pool = set(state.candidates) - (state.drawn - again) if state.settled else set()
    missing = state.goal - len(state.admitted)
    cohort = draw_fixed(pool, _cohort_size(state, missing), Draw(state.policy.seed, state.round, state.attempt))
    if not cohort and not state.working:
        return wait_for_clients(state, AwaitClients(missing, len(pool)))
    state = replace(state, phase=Phase.COLLECTING, drawn=state.drawn | set(cohort), out=state.out - set(cohort))
    return state, (OpenAttempt(state.round, state.exchange, state.attempt, cohort),)


def wait_for_clients(state: RoundState, waits: AwaitClients) -> Result:
    """No client works, and none is left to draw: restart the client states if that helps, end the run, or wait."""
    if restart_helps(state):
        state, effects = restart_round(state, lost_states(state), states=True)
        return state, (waits, *effects)
    if fault := no_client_delivers(state):
        state, effects = end_by_fault(state, fault)
        return state, (waits, *effects)
    return replace(state, phase=Phase.SELECTING), (waits, RetryLater())


def next_round(state: RoundState) -> RoundState:
    """The state before the first draw of the next round."""
    fresh = replace(
        state, round=state.round + 1, attempt=0, first_attempt=0, exchange=0, phase=Phase.SELECTING, goal=0,
        drawn=frozenset(), out=frozenset(), failed=ByClient(), restarts=ByClient(), refused=ByClient(), admitted=(),
        accepted=(), fixed=(), cancelled=frozenset(), repeated=False, answered=frozenset(), graph=None,
        sharers=frozenset(), resting=False, work=ByClient(), versions=(),
    )  # fmt: skip
    return carried_over(state, fresh) if state.policy.buffered else fresh


def redraw(state: RoundState) -> RoundState:
    """The state before another first draw of the same round, as a new attempt."""
    attempt = state.attempt + 1
    again = replace(next_round(state), round=state.round, attempt=attempt, first_attempt=attempt)
    return without_version(again) if state.policy.buffered else again


def restart_round(state: RoundState, why: str = "", *, states: bool = False) -> Result:
    """Discard what the round has collected, and redraw it. states: the client states are reset too."""
    why = why or f"exchange {state.exchange} had {counted(state.collected, 'update')}, and needs {state.quorum}"
    cancelled = cancel(state) if state.goal else ()
    state = redraw(state) if state.goal else state
    state, restart = reset_states(state, why) if states else (state, given_up(state, why))
    state, effects = select(state)
    return state, (restart, *cancelled, *effects)


def reset_states(state: RoundState, why: str) -> tuple[RoundState, RestartRound]:
    """Begin the next epoch of the client states."""
    epoch = state.state_epoch + 1
    state = replace(
        state, members=frozenset(), state_epoch=epoch, epoch_rounds=0, lost=ByClient(), states_lost=""
    )  # fmt: skip
    return state, given_up(state, why, states=True)


def given_up(state: RoundState, why: str, *, states: bool = False) -> RestartRound:
    """The effect that removes what the round had. state: the one before its next draw."""
    past_draws = state.attempt if state.policy.secure else 0
    return RestartRound(state.round, why, states, state.state_epoch, past_draws)


def lost_states(state: RoundState) -> str:
    """Why the states are reset: the clients that wait for it."""
    client, first = next(iter(state.lost.items()))
    more = f", and {len(state.lost) - 1} more" if len(state.lost) > 1 else ""
    return f"{client}: {first.why}{more}"


def restart_helps(state: RoundState) -> bool:
    """Whether a reset of the states lets clients be drawn again that the run lacks."""
    return any(not lost.left_out for lost in state.lost.values())


def restart_states(state: RoundState, event: StatesLost) -> Result:
    """Reset the states. A round under way was trained from the old states, so it is redrawn."""
    if state.goal:
        return restart_round(state, event.why, states=True)
    return restart_states_alone(state, event)


def restart_states_alone(state: RoundState, event: StatesLost) -> Result:
    """Reset the states when no round is under way, or after the end of a run, which may be extended."""
    state, restart = reset_states(state, event.why)
    return state, (restart,)


def restart_states_later(state: RoundState, event: StatesLost) -> Result:
    """Commit the step under way first: its updates were made from valid states."""
    return replace(state, states_lost=event.why), ()


def released(state: RoundState, event: ClientReleased) -> Result:
    """A client that was left out takes part again, from the next reset of the states on if it lost its own."""
    if (lost := state.lost.get(event.client)) is None:
        return state, ()
    state = replace(state, lost=ByClient({**state.lost, event.client: Lost(lost.why, left_out=False)}))
    return select(state) if state.phase is Phase.SELECTING else (state, ())


def learn(state: RoundState) -> RoundState:
    """Adapt the over-selection factor to the drop-outs of the closing exchange.

    Clients still at work when the first attempt reaches its goal were only slower. A list that was fixed before a
    restart gives no information: the drop-outs are not stored. An exchange that is closed again was counted before.
    """
    if state.policy.close == "cohort" or state.exchange or state.fixed or state.repeated:
        return state
    quick = len(state.admitted) >= state.goal and state.attempt == state.first_attempt
    dropped = len(state.out) + (0 if quick else state.working)
    start = state.policy.over_selection
    factor = adapted(state.draws_per_update, start, len(state.admitted), dropped)
    return replace(state, over_selection=factor)
