"""The life of a run's rounds as a state machine without I/O: event in, (state, commands) out.

    SELECTING --draw--> COLLECTING --closes--> STEPPING --> COMMITTING --> (EVALUATING) --> SELECTING
                          |    ^                                                      '-> ENDED
                          |    '--reduced-- REDUCING <--closes, and the method has another exchange--.
                          '--------------------------------------------------------------------------'

Two rules. All that decides what happens next in a run lives in `RoundState`; whoever drives it keeps no flags of its
own. And this file knows no clock, store, network or tensor: what must be done is returned as commands, in the order in
which to do them, and what happened comes back as events.

A round closes at its goal; or when nobody outstanding can still deliver and the quorum holds; or at the deadline with
the quorum. Below quorum the next attempt keeps what was admitted (x_t has not moved, so it is still exact), lets
stragglers go on and draws replacements only. docs/round-states.md draws all transitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fl_server.events import (
    Announce,
    AwaitClients,
    Cancel,
    ClientBack,
    ClientOut,
    Command,
    Commit,
    Committed,
    DeadlinePassed,
    End,
    EndRequested,
    EndStatus,
    Evaluated,
    Event,
    ExchangeReduced,
    Extended,
    OpenAttempt,
    PauseRequested,
    PickedUp,
    ReduceExchange,
    RestartRound,
    ResumeRequested,
    RetryDue,
    RetryLater,
    RosterChanged,
    Source,
    StatesLost,
    Step,
    Stepped,
    UpdateAdmitted,
)
from fl_server.round_state import Phase, RoundPolicy, RoundState
from fl_server.sampling import Draw, by_id, draw_bernoulli, draw_fixed

Result = tuple[RoundState, tuple[Command, ...]]
Rule = Callable[[RoundState, Any], Result]


class UnexpectedEvent(Exception):
    """An event that the phase has no rule for; nothing was changed. It is a fault of whoever drives the machine."""

    def __init__(self, event: Event, state: RoundState, why: str = "no rule for it") -> None:
        super().__init__(f"{type(event).__name__} in phase {state.phase.value} of round {state.round}: {why}")
        self.event = event
        self.state = state


def advance(state: RoundState, event: Event) -> Result:
    """Apply one event. An event that its phase has no rule for raises UnexpectedEvent and changes nothing."""
    rule = RULES.get((state.phase, type(event)))
    if rule is None:
        raise UnexpectedEvent(event, state)
    return rule(state, event)


# Drawing.


def _select(state: RoundState) -> Result:
    """Draw if the run may and can; else stay in SELECTING and say what is missing. A pause holds no open round up."""
    if not state.settled or (state.paused and not state.goal):
        return state, ()
    if state.goal:
        return _draw_replacements(state)
    policy, candidates = state.policy, state.candidates
    if len(candidates) < policy.min_clients:
        return state, (AwaitClients(policy.min_clients, len(candidates)),)
    draw = Draw(policy.seed, state.round, state.attempt)
    if policy.sampling == "bernoulli":
        cohort = draw_bernoulli(candidates, policy.rate, draw)
    else:
        cohort = draw_fixed(candidates, _cohort_size(policy, policy.clients_per_round), draw)
    state = replace(state, phase=Phase.COLLECTING, goal=goal_of(policy, cohort), drawn=frozenset(cohort))
    return state, (OpenAttempt(state.round, state.exchange, state.attempt, cohort),)


def goal_of(policy: RoundPolicy, cohort: tuple[str, ...]) -> int:
    """Updates wanted in a round whose first attempt drew this cohort."""
    return len(cohort) if policy.sampling == "bernoulli" else min(policy.clients_per_round, len(cohort))


def _cohort_size(policy: RoundPolicy, wanted: int) -> int:
    if policy.close == "cohort":
        return wanted
    # 50 * 1.1 is 55.00000000000001 in floating point, and means 55.
    return math.ceil(round(wanted * policy.over_selection, 6))


def _draw_replacements(state: RoundState) -> Result:
    """The next attempt of a round below quorum: what was admitted stays, stragglers go on, replacements are drawn."""
    pool = set(state.candidates) - state.drawn if state.settled else set()
    missing = state.goal - len(state.admitted)
    cohort = draw_fixed(pool, _cohort_size(state.policy, missing), Draw(state.policy.seed, state.round, state.attempt))
    if not cohort and not state.outstanding:
        waiting = replace(state, phase=Phase.SELECTING)
        return waiting, (AwaitClients(missing, len(pool)), RetryLater())
    state = replace(state, phase=Phase.COLLECTING, drawn=state.drawn | set(cohort))
    return state, (OpenAttempt(state.round, state.exchange, state.attempt, cohort),)


# Collecting.


def _admit(state: RoundState, event: UpdateAdmitted) -> Result:
    if event.client not in state.drawn:
        raise UnexpectedEvent(event, state, f"{event.client} is not of this round's cohort")
    if any(client == event.client for client, _ in state.admitted):
        raise UnexpectedEvent(event, state, f"{event.client} was admitted before")
    admitted = (*state.admitted, (event.client, event.digest))
    return _close_if_done(replace(state, admitted=admitted, out=state.out - {event.client}))


def _admit_while_waiting(state: RoundState, event: UpdateAdmitted) -> Result:
    """Nobody was expected any more, and yet one of the cohort delivered: x_t has not moved, so it counts."""
    return _admit(replace(state, phase=Phase.COLLECTING), event)


def _client_out(state: RoundState, event: ClientOut) -> Result:
    if event.client not in state.outstanding:
        raise UnexpectedEvent(event, state, f"{event.client} is not outstanding")
    return _close_if_done(replace(state, out=state.out | {event.client}))


def _client_back(state: RoundState, event: ClientBack) -> Result:
    if event.client not in state.out:
        raise UnexpectedEvent(event, state, f"{event.client} is not out")
    return replace(state, out=state.out - {event.client}), ()


def _client_returns(state: RoundState, event: ClientBack) -> Result:
    """Nobody was left to draw, and one of the cohort came back: the attempt goes on with it."""
    state, _ = _client_back(state, event)
    return replace(state, phase=Phase.COLLECTING), (OpenAttempt(state.round, state.exchange, state.attempt, ()),)


def _close_if_done(state: RoundState) -> Result:
    count = len(state.admitted)
    if count >= state.goal:
        return _close(state)
    if state.outstanding:
        return state, ()
    return _close(state) if count >= state.quorum else _next_attempt(state)


def _picked_up(state: RoundState, event: PickedUp) -> Result:
    """Go on where the ledger says: an exchange that has all it needs is closed."""
    del event
    return _close_if_done(state)


def _deadline(state: RoundState, event: DeadlinePassed) -> Result:
    del event
    if len(state.admitted) >= state.quorum:
        return _close(state)
    # A client that hangs must not keep those who failed from another try for ever.
    untried = set(state.candidates) - state.drawn
    return _next_attempt(state if untried else _forgive(state))


def _forgive(state: RoundState) -> RoundState:
    """Who is out but present may be drawn again. The lost stay of the cohort: one may yet come back with its work."""
    again = state.out & set(state.eligible)
    return replace(state, drawn=state.drawn - again, out=state.out - again)


def _next_attempt(state: RoundState) -> Result:
    if state.exchange:
        # The cohort of a later exchange is the accepted set of the one before: nobody can replace it.
        return _restart_round(state)
    return _draw_replacements(replace(state, attempt=state.attempt + 1))


def _restart_round(state: RoundState, why: str = "", *, states: bool = False) -> Result:
    """Give up what the round's exchanges collected and draw it anew."""
    why = why or f"exchange {state.exchange} had {len(state.admitted)} of the {state.quorum} updates that it needs"
    cancel = _cancel(state)
    restart = RestartRound(state.round, why, states)
    state, commands = _select(_anew(replace(state, members=frozenset()) if states else state))
    return state, (restart, *cancel, *commands)


def _anew(state: RoundState) -> RoundState:
    """The same round with nothing drawn, as another attempt."""
    attempt = state.attempt + 1
    return replace(_next_round(state), round=state.round, attempt=attempt, first_attempt=attempt)


def _cancel(state: RoundState) -> tuple[Command, ...]:
    return (Cancel(by_id(state.outstanding), state.exchange),) if state.outstanding else ()


def _restart_states(state: RoundState, event: StatesLost) -> Result:
    """A round under way was trained from states that mean nothing any more: it is given up too."""
    return _restart_round(state, event.why, states=True) if state.goal else _restart_states_alone(state, event)


def _restart_states_alone(state: RoundState, event: StatesLost) -> Result:
    """No round is under way, or the run has ended and is going to be extended."""
    return replace(state, members=frozenset()), (RestartRound(state.round, event.why, states=True),)


def _restart_states_later(state: RoundState, event: StatesLost) -> Result:
    """What the step under way was made from was right when it was made; it is finished and committed first."""
    return replace(state, states_lost=event.why), ()


def _close(state: RoundState) -> Result:
    """At most `goal` updates, the first to arrive, in the order of id bytes; then who still works is told to stop.

    In this order: whoever is told to stop forgets its work, so a restart must not be able to accept it after all.
    """
    accepted = tuple(sorted(state.admitted[: state.goal], key=lambda entry: entry[0].encode()))
    cancel = _cancel(state)
    state = replace(state, accepted=accepted, out=state.out | state.outstanding)
    if state.exchange + 1 < state.policy.exchanges:
        return replace(state, phase=Phase.REDUCING), (ReduceExchange(accepted), *cancel)
    return replace(state, phase=Phase.STEPPING), (Step(accepted), *cancel)


def _next_exchange(state: RoundState, event: ExchangeReduced) -> Result:
    del event
    if state.states_lost:
        lost, state = state.states_lost, replace(state, states_lost="")
        return _restart_round(state, lost, states=True)
    cohort = tuple(client for client, _ in state.accepted)
    state = replace(
        state, phase=Phase.COLLECTING, exchange=state.exchange + 1, goal=len(cohort), drawn=frozenset(cohort),
        out=frozenset(), admitted=(),
    )  # fmt: skip
    return state, (OpenAttempt(state.round, state.exchange, state.attempt, cohort),)


# Step, commit, evaluate.


def _stepped(state: RoundState, event: Stepped) -> Result:
    del event
    return replace(state, phase=Phase.COMMITTING), (Commit(),)


def _committed(state: RoundState, event: Committed) -> Result:
    del event
    evaluate, ask = evaluation_due(state, state.round), clients_due(state, state.round)
    if state.policy.population:
        state = replace(state, members=state.members | {client for client, _ in state.accepted})
    announce = Announce(state.round, evaluate, ask)
    if awaited := awaited_evaluations(state, state.round):
        return replace(_next_round(state), phase=Phase.EVALUATING, awaited=awaited), (announce,)
    state, commands = _go_on(_next_round(state))
    return state, (announce, *commands)


def evaluation_due(state: RoundState, round: int) -> bool:
    """Whether a committed round is to be evaluated: every so many, and the last."""
    return _due(state, round, state.policy.evaluate_every)


def clients_due(state: RoundState, round: int) -> bool:
    """Whether clients are to evaluate a committed round: every so many, and the last."""
    return _due(state, round, state.policy.ask_clients_every)


def awaited_evaluations(state: RoundState, round: int) -> frozenset[Source]:
    """Whose evaluations of a committed round the run waits for: of the last one all, else what its stop rule needs."""
    last, policy = _is_last(state, round), state.policy
    server = evaluation_due(state, round) and (last or policy.await_evaluation)
    clients = clients_due(state, round) and (last or policy.await_clients)
    by: dict[Source, bool] = {"server": server, "clients": clients}
    return frozenset(source for source, awaited in by.items() if awaited)


def _due(state: RoundState, round: int, every: int) -> bool:
    return every > 0 and (_is_last(state, round) or (round + 1) % every == 0)


def _is_last(state: RoundState, round: int) -> bool:
    return round + 1 >= state.rounds or state.ending is not None


def _evaluated(state: RoundState, event: Evaluated) -> Result:
    state = replace(state, awaited=state.awaited - {event.by})
    return (state, ()) if state.awaited else _go_on(state)


def _next_round(state: RoundState) -> RoundState:
    return replace(
        state, round=state.round + 1, attempt=0, first_attempt=0, exchange=0, phase=Phase.SELECTING, goal=0,
        drawn=frozenset(), out=frozenset(), admitted=(), accepted=(),
    )  # fmt: skip


def _go_on(state: RoundState) -> Result:
    """Between two rounds: end if the run is to end, else select."""
    if state.ending is not None:
        return replace(state, phase=Phase.ENDED), (End(*state.ending),)
    if state.round >= state.rounds:
        ending: tuple[EndStatus, str] = ("completed", f"{state.rounds} rounds are done")
        return replace(state, phase=Phase.ENDED, ending=ending), (End(*ending),)
    if state.states_lost:
        restart = RestartRound(state.round, state.states_lost, states=True)
        state, commands = _select(replace(state, phase=Phase.SELECTING, members=frozenset(), states_lost=""))
        return state, (restart, *commands)
    return _select(replace(state, phase=Phase.SELECTING))


# What operators and the roster say.


def _roster(state: RoundState, event: RosterChanged) -> Result:
    state = replace(state, eligible=by_id(event.eligible), settled=event.settled)
    return _go_on(state) if state.phase is Phase.SELECTING else (state, ())


def _retry(state: RoundState, event: RetryDue) -> Result:
    if not state.goal:
        raise UnexpectedEvent(event, state, "this round has not been drawn, so nothing waits for a retry")
    return _select(replace(_forgive(state), attempt=state.attempt + 1))


def _pause(state: RoundState, event: PauseRequested) -> Result:
    del event
    return replace(state, paused=True), ()


def _resume(state: RoundState, event: ResumeRequested) -> Result:
    del event
    state = replace(state, paused=False)
    return _select(state) if state.phase is Phase.SELECTING else (state, ())


def _extend(state: RoundState, event: Extended) -> Result:
    if event.rounds <= state.round:
        raise UnexpectedEvent(event, state, f"expected more than the {state.round} rounds that are done")
    return replace(state, rounds=event.rounds), ()


def _reopen(state: RoundState, event: Extended) -> Result:
    if state.ending is None or state.ending[0] != "completed":
        raise UnexpectedEvent(event, state, "only a completed run can be extended")
    state, _ = _extend(state, event)
    # A round that the end cut short had its clients cancelled: it is drawn anew.
    return _go_on(replace(_anew(state) if state.goal else state, ending=None))


def _end_now(state: RoundState, event: EndRequested) -> Result:
    """The round under way is given up."""
    ending = (event.status, event.reason)
    ended = replace(state, phase=Phase.ENDED, ending=ending, out=state.out | state.outstanding)
    return ended, (*_cancel(state), End(*ending))


def _end_later(state: RoundState, event: EndRequested) -> Result:
    """A step under way is finished and committed first; an error cannot wait for that."""
    if event.status == "failed":
        return _end_now(state, event)
    return replace(state, ending=(event.status, event.reason)), ()


_OPEN = [phase for phase in Phase if phase is not Phase.ENDED]
_STEPPING = (Phase.STEPPING, Phase.COMMITTING)
_COLLECTING = (Phase.SELECTING, Phase.COLLECTING)

RULES: dict[tuple[Phase, type], Rule] = {
    (Phase.SELECTING, RetryDue): _retry,
    (Phase.SELECTING, ClientBack): _client_returns,
    (Phase.SELECTING, UpdateAdmitted): _admit_while_waiting,
    (Phase.COLLECTING, UpdateAdmitted): _admit,
    (Phase.COLLECTING, PickedUp): _picked_up,
    (Phase.COLLECTING, ClientOut): _client_out,
    (Phase.COLLECTING, ClientBack): _client_back,
    (Phase.COLLECTING, DeadlinePassed): _deadline,
    (Phase.REDUCING, ExchangeReduced): _next_exchange,
    (Phase.STEPPING, Stepped): _stepped,
    (Phase.COMMITTING, Committed): _committed,
    (Phase.EVALUATING, Evaluated): _evaluated,
    (Phase.ENDED, Extended): _reopen,
    **{(phase, RosterChanged): _roster for phase in Phase},
    **{(phase, PauseRequested): _pause for phase in _OPEN},
    **{(phase, ResumeRequested): _resume for phase in _OPEN},
    **{(phase, Extended): _extend for phase in _OPEN},
    **{(phase, StatesLost): _restart_states if phase in _COLLECTING else _restart_states_later for phase in _OPEN},
    (Phase.ENDED, StatesLost): _restart_states_alone,
    **{(phase, EndRequested): _end_later if phase in _STEPPING else _end_now for phase in _OPEN},
}
"""What each phase does about each event. A pair that is not here is refused."""
