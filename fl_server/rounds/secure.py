"""Rules of the stages of secure aggregation (SecAgg+, Bell et al. 2020), before and after the masked updates.

    AGREEING    the cohort's public keys                              while the clients begin to train
    TOSSING     coins for the graph of a large cohort                 all must come
    SHARING     each client's secrets, in shares for its neighbours
    COLLECTING  the masked updates of those whose shares are there
    SIGNING     the survivors sign the list of those whose masked updates are here
    OPENING     with enough signatures they open one secret of each client: that of its pairs, or that of its own mask

A stage ends when all have answered, or at its deadline; the last two end as soon as they have enough. A client without
an answer before its masked update takes no part in what follows. No client is replaced: keys and shares are of one
cohort. A round that has lost too many is abandoned, with all that it has: the next draw of the same round has other
training seeds, since two sums over nearly the same work would show what they do not have in common.
"""

from __future__ import annotations

from collections.abc import Sized

from fl_server.rounds.effects import Cancel, ComputeStep, Effect, OpenStage, QuorumMissed, RetryLater
from fl_server.rounds.ending import cancel, end_by_fault, end_now, same_failure
from fl_server.rounds.events import EndRequested, GraphMade, RoundSpoiled, StageAnswered
from fl_server.rounds.sampling import by_id
from fl_server.rounds.selecting import given_up, redraw, select
from fl_server.rounds.state import AFTER_MASKS, Phase, Result, RoundState, UnexpectedEvent, replace

ANSWERS = {
    Phase.AGREEING: "keys",
    Phase.TOSSING: "coins",
    Phase.SHARING: "shares",
    Phase.COLLECTING: "masked updates",
    Phase.SIGNING: "signatures",
    Phase.OPENING: "opened shares",
}
"""What clients send in each stage."""


def stage_answered(state: RoundState, event: StageAnswered) -> Result:
    """A client has answered."""
    client = event.client
    if client not in state.drawn or client in state.answered:
        raise UnexpectedEvent(event, state, f"no answer of {client} is expected")
    return close_stage_if_done(replace(state, answered=state.answered | {client}, out=state.out - {client}))


def take_graph(state: RoundState, event: GraphMade) -> Result:
    """Keep the graph, which all later stages need."""
    return close_stage_if_done(replace(state, graph=event.graph))


def close_stage_if_done(state: RoundState) -> Result:
    """End the stage if no answer is waited for, or if those that are here are enough."""
    graph, answered = state.graph, state.answered
    match state.phase:
        case Phase.SHARING if graph is None:
            return state, ()
        case Phase.SIGNING if graph is not None and len(answered) >= graph.quorum:
            return close_stage(state)
        case Phase.OPENING if graph is not None and graph.opens_all(state.sharers, answered):
            return close_stage(state)
    return (state, ()) if state.unanswered else close_stage(state)


def close_stage(state: RoundState) -> Result:
    """Open the next stage, or abandon the round if too few have answered."""
    answered, graph = state.answered, state.graph
    many, all_here = len(answered) >= state.quorum, answered == state.drawn
    result: Result | None = None
    match state.phase:
        case Phase.AGREEING if many:
            tosses = len(answered) > state.policy.most_full
            result = _open(state, Phase.TOSSING if tosses else Phase.SHARING, answered)
        case Phase.TOSSING if all_here:
            result = _open(state, Phase.SHARING, answered)
        case Phase.SHARING if many and graph is not None and len(answered) >= graph.quorum:
            if graph.opens_all(answered, answered):
                result = _open(replace(state, sharers=answered), Phase.COLLECTING, answered)
        case Phase.SIGNING if graph is not None and len(answered) >= graph.quorum:
            result = _open(state, Phase.OPENING, state.drawn)
        case Phase.OPENING if graph is not None and graph.opens_all(state.sharers, answered):
            result = replace(state, phase=Phase.STEPPING), (ComputeStep(state.accepted),)
    return abandon(state, too_few(state, answered, state.drawn)) if result is None else result


def too_few(state: RoundState, came: Sized, asked: Sized) -> str:
    """Why the stage under way cannot end: of how many clients the answers came."""
    who = f"{len(came)} of {len(asked)}" if state.policy.tells_clients else "too few"
    return f"{who} clients sent their {ANSWERS[state.phase]}"


def masks_open(state: RoundState) -> bool:
    """Whether the clients whose masked updates are here are enough to open all masks."""
    graph, survivors = state.graph, state.survivors
    return graph is not None and len(survivors) >= graph.fewest and graph.opens_all(state.sharers, survivors)


def begin_signing(state: RoundState) -> Result:
    """Close the collection of masked updates: the list of their clients is what the survivors sign."""
    return _open(state, Phase.SIGNING, state.survivors)


def _open(state: RoundState, phase: Phase, members: frozenset[str]) -> Result:
    """Open the next stage. Clients at work that are not among its members are cancelled."""
    closed = members if state.phase is Phase.COLLECTING else state.answered
    gone: tuple[Effect, ...] = ()
    if state.phase not in AFTER_MASKS and (rest := state.outstanding - members):
        gone = (Cancel(by_id(rest), state.exchange),)
    place = (state.round, state.exchange, state.attempt)
    out = state.out & members if phase is Phase.OPENING else frozenset()
    state = replace(state, phase=phase, drawn=members, out=out, answered=frozenset())
    return state, (OpenStage(*place, phase.value, by_id(members), by_id(closed)), *gone)


def abandon(state: RoundState, why: str) -> Result:
    """Give the round up with all that it has, and draw it again, or end the run.

    The second redraw in a row waits, so that a cohort that fails at once is not drawn without end.
    """
    missed = QuorumMissed(state.round, state.exchange, state.attempt, len(state.admitted), state.quorum)
    if fault := same_failure(state):
        state, effects = end_by_fault(state, fault)
        return state, (missed, *effects)
    if state.policy.on_drop == "end":
        reason = f'round {state.round} was abandoned: {why}; secure_aggregation.on_drop is "end"'
        state, effects = end_now(state, EndRequested("failed", reason))
        return state, (missed, *effects)
    cancelled, first = cancel(state), state.attempt == 0
    state = redraw(state)
    restart = given_up(state, why)
    if first:
        state, effects = select(state)
    else:
        state, effects = replace(state, resting=True), (RetryLater(),)
    return state, (missed, restart, *cancelled, *effects)


def round_spoiled(state: RoundState, event: RoundSpoiled) -> Result:
    """The answers of the stage, or the masked updates, cannot be used, though enough are here."""
    if state.ending is not None:
        return end_now(state, EndRequested(*state.ending))
    return abandon(state, event.why if state.policy.tells_clients else "its answers or its sum cannot be used")
