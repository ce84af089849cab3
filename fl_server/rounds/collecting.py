"""Rules of the collecting phase: admitted updates, clients that drop out or return, and closing an exchange."""

from __future__ import annotations

from dataclasses import replace

from fl_server.rounds.control import end_now
from fl_server.rounds.events import (
    ClientDroppedOut,
    ClientReturned,
    ComputeStep,
    CulpritsFound,
    DeadlinePassed,
    DropCulprits,
    EndRequested,
    EndRun,
    ExchangeReduced,
    OpenAttempt,
    QuorumMissed,
    ReduceExchange,
    RetryDue,
    RoundRestored,
    UpdateAdmitted,
)
from fl_server.rounds.over_selection import adapted
from fl_server.rounds.same_failure import same_failure
from fl_server.rounds.selecting import cancel, draw_replacements, restart_round, select
from fl_server.rounds.state import Failed, Phase, Result, RoundState, UnexpectedEvent


def admit(state: RoundState, event: UpdateAdmitted) -> Result:
    """An update that counts towards the goal."""
    if event.client not in state.drawn:
        raise UnexpectedEvent(event, state, f"{event.client} is not of this round's cohort")
    if state.arrivals.has(event.client):
        raise UnexpectedEvent(event, state, f"{event.client} was admitted before")
    out = state.out - {event.client} if event.client in state.out else state.out
    admitted, failed = state.arrivals.added(event.client, event.digest), without(state, event.client)
    return close_if_done(replace(state, admitted=admitted, out=out, failed=failed))


def without(state: RoundState, client: str) -> tuple[Failed, ...]:
    """The failures of the other clients."""
    return tuple(each for each in state.failed if each.client != client) if state.failed else ()


def admit_while_waiting(state: RoundState, event: UpdateAdmitted) -> Result:
    """A client of the cohort delivered while no client was outstanding: x_t is unchanged, so its update counts."""
    state, commands = admit(replace(state, phase=Phase.COLLECTING), event)
    # The waiting attempt was never opened, so it has missed no quorum.
    return state, tuple(command for command in commands if not isinstance(command, QuorumMissed))


def client_out(state: RoundState, event: ClientDroppedOut) -> Result:
    """An outstanding client will not deliver."""
    if not state.works(event.client):
        raise UnexpectedEvent(event, state, f"{event.client} is not outstanding")
    failed = state.failed
    if event.cause:
        failed = (*without(state, event.client), Failed(event.client, event.cause, event.why))
    return close_if_done(replace(state, out=state.out | {event.client}, failed=failed))


def client_back(state: RoundState, event: ClientReturned) -> Result:
    """A client that had dropped out can deliver again."""
    if event.client not in state.out:
        raise UnexpectedEvent(event, state, f"{event.client} is not out")
    return replace(state, out=state.out - {event.client}), ()


def client_returns(state: RoundState, event: ClientReturned) -> Result:
    """No client was left to draw, and one of the cohort returned: the attempt continues with it."""
    state, _ = client_back(state, event)
    return replace(state, phase=Phase.COLLECTING), (OpenAttempt(state.round, state.exchange, state.attempt, ()),)


def close_if_done(state: RoundState) -> Result:
    """Close at the goal, or with a quorum when no client can deliver; below the quorum start the next attempt."""
    if state.fixed:
        return close_as_fixed(state)
    count = len(state.admitted)
    if count >= state.goal:
        return close(state)
    if state.working:
        return state, ()
    return close(state) if count >= state.quorum else next_attempt(state)


def close_as_fixed(state: RoundState) -> Result:
    """Close once all updates of the fixed list are present; if one cannot come again, redraw the round.

    The step of that list was never committed, so no client knows of it.
    """
    if len(state.admitted) == len(state.fixed) and set(state.admitted) == set(state.fixed):
        return close(state)
    return (state, ()) if state.working else give_up_fixed(state)


def give_up_fixed(state: RoundState) -> Result:
    """Redraw the round: an update of the fixed list is lost."""
    missing = len(set(state.fixed) - set(state.admitted))
    return restart_round(
        state, f"the bytes of {missing} of its {len(state.fixed)} accepted updates are lost, and did not come again"
    )


def picked_up(state: RoundState, event: RoundRestored) -> Result:
    """Continue a restored round: close the exchange if it has all its updates."""
    del event
    return close_if_done(state)


def deadline(state: RoundState, event: DeadlinePassed) -> Result:
    """Close with a quorum; else start the next attempt."""
    del event
    if state.fixed:
        return give_up_fixed(state)
    if len(state.admitted) >= state.quorum:
        return close(state)
    # One client that hangs must not keep the clients that failed from being drawn again.
    untried = set(state.candidates) - state.drawn
    return next_attempt(state if untried else forgive(state))


def forgive(state: RoundState) -> RoundState:
    """Clients that dropped out and are present may be drawn again. Lost ones stay in the cohort: they may return."""
    again = state.out & set(state.eligible)
    return replace(state, drawn=state.drawn - again, out=state.out - again)


def retry(state: RoundState, event: RetryDue) -> Result:
    """Draw again, also clients that failed."""
    if not state.goal:
        raise UnexpectedEvent(event, state, "this round has not been drawn, so nothing waits for a retry")
    return select(replace(forgive(state), attempt=state.attempt + 1))


def next_attempt(state: RoundState) -> Result:
    """Start the next attempt, unless the task's code fails everywhere."""
    if why := same_failure(state):
        return end_now(state, EndRequested("failed", why))
    missed = QuorumMissed(state.round, state.exchange, state.attempt, len(state.admitted), state.quorum)
    if state.exchange:
        # The cohort of a later exchange is the accepted list of the one before: there are no replacements.
        state, commands = restart_round(state)
    else:
        state, commands = draw_replacements(replace(state, attempt=state.attempt + 1))
    return state, (missed, *commands)


def close(state: RoundState) -> Result:
    """Accept the first `goal` updates to arrive, sorted by id bytes, and then cancel the outstanding clients.

    The order matters: a cancelled client drops its work, so a restart must not be able to accept it later.
    """
    accepted = tuple(sorted(state.admitted[: state.goal], key=lambda entry: entry[0].encode()))
    cancelled = cancel(state)
    state = replace(learn(state), accepted=accepted, out=state.out | state.outstanding, fixed=())
    if state.exchange + 1 < state.policy.exchanges:
        return replace(state, phase=Phase.REDUCING), (ReduceExchange(accepted), *cancelled)
    return replace(state, phase=Phase.STEPPING), (ComputeStep(accepted), *cancelled)


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


def drop_culprits(state: RoundState, event: CulpritsFound) -> Result:
    """Reopen the exchange as if these updates had been refused: it closes without them, or others are drawn."""
    gone = {client for client, _ in event.culprits}
    if unknown := gone - {client for client, _ in state.accepted}:
        raise UnexpectedEvent(event, state, f"{min(unknown)} is not on the accepted list")
    drop = DropCulprits(state.round, state.exchange, event.culprits, event.relative)
    admitted = tuple(entry for entry in state.admitted if entry[0] not in gone)
    state = replace(
        state, phase=Phase.COLLECTING, admitted=admitted, accepted=(), out=state.out | gone, repeated=True
    )  # fmt: skip
    if state.ending is not None:
        return replace(state, phase=Phase.ENDED), (drop, EndRun(*state.ending))
    if state.states_lost:
        lost, state = state.states_lost, replace(state, states_lost="")
        state, commands = restart_round(state, lost, states=True)
    else:
        state, commands = close_if_done(state)
    return state, (drop, *commands)


def next_exchange(state: RoundState, event: ExchangeReduced) -> Result:
    """Open the next exchange for the accepted clients of the last one."""
    del event
    if state.states_lost:
        lost, state = state.states_lost, replace(state, states_lost="")
        return restart_round(state, lost, states=True)
    cohort = tuple(client for client, _ in state.accepted)
    state = replace(
        state, phase=Phase.COLLECTING, exchange=state.exchange + 1, goal=len(cohort), drawn=frozenset(cohort),
        out=frozenset(), failed=(), admitted=(), repeated=False,
    )  # fmt: skip
    return state, (OpenAttempt(state.round, state.exchange, state.attempt, cohort),)
