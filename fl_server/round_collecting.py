"""Collecting: updates that come, clients that go, and when an exchange closes. One part of `rounds.py`."""

from __future__ import annotations

from dataclasses import replace

from fl_server.events import (
    ClientBack,
    ClientOut,
    CulpritsFound,
    DeadlinePassed,
    DropCulprits,
    End,
    ExchangeReduced,
    OpenAttempt,
    PickedUp,
    QuorumMissed,
    ReduceExchange,
    RetryDue,
    Step,
    UpdateAdmitted,
)
from fl_server.over_selection import adapted
from fl_server.round_drawing import cancel, draw_replacements, restart_round, select
from fl_server.round_rule import Result, UnexpectedEvent
from fl_server.round_state import Phase, RoundState


def admit(state: RoundState, event: UpdateAdmitted) -> Result:
    """An update that counts towards the goal."""
    if event.client not in state.drawn:
        raise UnexpectedEvent(event, state, f"{event.client} is not of this round's cohort")
    if any(client == event.client for client, _ in state.admitted):
        raise UnexpectedEvent(event, state, f"{event.client} was admitted before")
    admitted = (*state.admitted, (event.client, event.digest))
    return close_if_done(replace(state, admitted=admitted, out=state.out - {event.client}))


def admit_while_waiting(state: RoundState, event: UpdateAdmitted) -> Result:
    """Nobody was expected any more, and yet one of the cohort delivered: x_t has not moved, so it counts."""
    state, commands = admit(replace(state, phase=Phase.COLLECTING), event)
    # The attempt that waits was never opened, so it has not missed anything.
    return state, tuple(command for command in commands if not isinstance(command, QuorumMissed))


def client_out(state: RoundState, event: ClientOut) -> Result:
    """Somebody who is worked for will not deliver."""
    if event.client not in state.outstanding:
        raise UnexpectedEvent(event, state, f"{event.client} is not outstanding")
    return close_if_done(replace(state, out=state.out | {event.client}))


def client_back(state: RoundState, event: ClientBack) -> Result:
    """Somebody who was out delivers after all."""
    if event.client not in state.out:
        raise UnexpectedEvent(event, state, f"{event.client} is not out")
    return replace(state, out=state.out - {event.client}), ()


def client_returns(state: RoundState, event: ClientBack) -> Result:
    """Nobody was left to draw, and one of the cohort came back: the attempt goes on with it."""
    state, _ = client_back(state, event)
    return replace(state, phase=Phase.COLLECTING), (OpenAttempt(state.round, state.exchange, state.attempt, ()),)


def close_if_done(state: RoundState) -> Result:
    """Close at the goal; or when nobody can deliver any more, with the quorum; else try again."""
    if state.fixed:
        return close_as_fixed(state)
    count = len(state.admitted)
    if count >= state.goal:
        return close(state)
    if state.outstanding:
        return state, ()
    return close(state) if count >= state.quorum else next_attempt(state)


def close_as_fixed(state: RoundState) -> Result:
    """Once all that the list names is there again; where it cannot come any more, the round is drawn anew.

    The step that the list was fixed for has not been committed, so nobody has heard of it.
    """
    if set(state.admitted) == set(state.fixed):
        return close(state)
    return (state, ()) if state.outstanding else give_up_fixed(state)


def give_up_fixed(state: RoundState) -> Result:
    """An update of the fixed list is lost for good."""
    missing = len(set(state.fixed) - set(state.admitted))
    return restart_round(
        state, f"the bytes of {missing} of its {len(state.fixed)} accepted updates are lost, and did not come again"
    )


def picked_up(state: RoundState, event: PickedUp) -> Result:
    """Go on where the ledger says: an exchange that has all it needs is closed."""
    del event
    return close_if_done(state)


def deadline(state: RoundState, event: DeadlinePassed) -> Result:
    """Close with the quorum; else try again."""
    del event
    if state.fixed:
        return give_up_fixed(state)
    if len(state.admitted) >= state.quorum:
        return close(state)
    # A client that hangs must not keep those who failed from another try for ever.
    untried = set(state.candidates) - state.drawn
    return next_attempt(state if untried else forgive(state))


def forgive(state: RoundState) -> RoundState:
    """Who is out but present may be drawn again. The lost stay of the cohort: one may yet come back with its work."""
    again = state.out & set(state.eligible)
    return replace(state, drawn=state.drawn - again, out=state.out - again)


def retry(state: RoundState, event: RetryDue) -> Result:
    """Those who failed may be drawn again."""
    if not state.goal:
        raise UnexpectedEvent(event, state, "this round has not been drawn, so nothing waits for a retry")
    return select(replace(forgive(state), attempt=state.attempt + 1))


def next_attempt(state: RoundState) -> Result:
    """Another try at filling the exchange."""
    missed = QuorumMissed(state.round, state.exchange, state.attempt, len(state.admitted), state.quorum)
    if state.exchange:
        # The cohort of a later exchange is the accepted set of the one before: nobody can replace it.
        state, commands = restart_round(state)
    else:
        state, commands = draw_replacements(replace(state, attempt=state.attempt + 1))
    return state, (missed, *commands)


def close(state: RoundState) -> Result:
    """At most `goal` updates, the first to arrive, in the order of id bytes; then who still works is told to stop.

    In this order: whoever is told to stop forgets its work, so a restart must not be able to accept it after all.
    """
    accepted = tuple(sorted(state.admitted[: state.goal], key=lambda entry: entry[0].encode()))
    told = cancel(state)
    state = replace(learn(state), accepted=accepted, out=state.out | state.outstanding, fixed=())
    if state.exchange + 1 < state.policy.exchanges:
        return replace(state, phase=Phase.REDUCING), (ReduceExchange(accepted), *told)
    return replace(state, phase=Phase.STEPPING), (Step(accepted), *told)


def learn(state: RoundState) -> RoundState:
    """What the closing exchange says of drop-outs, where more clients than wanted were drawn for it.

    Whoever is still at work when the goal is reached at the first attempt was only slower. A list that was fixed before
    a restart says nothing: who was out is forgotten. Nor does an exchange that is closed again: it was learned from.
    """
    if state.policy.close == "cohort" or state.exchange or state.fixed or state.repeated:
        return state
    quick = len(state.admitted) >= state.goal and state.attempt == state.first_attempt
    dropped = len(state.out) + (0 if quick else len(state.outstanding))
    start = state.policy.over_selection
    factor = adapted(state.draws_per_update, start, len(state.admitted), dropped)
    return replace(state, over_selection=factor)


def drop_culprits(state: RoundState, event: CulpritsFound) -> Result:
    """The exchange is open again as if these updates had been refused: it closes without them, or others are drawn."""
    gone = {client for client, _ in event.culprits}
    if unknown := gone - {client for client, _ in state.accepted}:
        raise UnexpectedEvent(event, state, f"{min(unknown)} is not on the accepted list")
    drop = DropCulprits(state.round, state.exchange, event.culprits)
    admitted = tuple(entry for entry in state.admitted if entry[0] not in gone)
    state = replace(
        state, phase=Phase.COLLECTING, admitted=admitted, accepted=(), out=state.out | gone, repeated=True
    )  # fmt: skip
    if state.ending is not None:
        return replace(state, phase=Phase.ENDED), (drop, End(*state.ending))
    if state.states_lost:
        lost, state = state.states_lost, replace(state, states_lost="")
        state, commands = restart_round(state, lost, states=True)
    else:
        state, commands = close_if_done(state)
    return state, (drop, *commands)


def next_exchange(state: RoundState, event: ExchangeReduced) -> Result:
    """What was accepted in the last exchange is asked again."""
    del event
    if state.states_lost:
        lost, state = state.states_lost, replace(state, states_lost="")
        return restart_round(state, lost, states=True)
    cohort = tuple(client for client, _ in state.accepted)
    state = replace(
        state, phase=Phase.COLLECTING, exchange=state.exchange + 1, goal=len(cohort), drawn=frozenset(cohort),
        out=frozenset(), admitted=(), repeated=False,
    )  # fmt: skip
    return state, (OpenAttempt(state.round, state.exchange, state.attempt, cohort),)
