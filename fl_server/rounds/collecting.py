"""Rules of the collecting phase: admitted updates, clients that drop out or return, and closing an exchange."""

from __future__ import annotations

from collections import Counter

from fl_server.rounds import effects as ef
from fl_server.rounds import events as ev
from fl_server.rounds.buffer import collect
from fl_server.rounds.by_client import ByClient, Failed, Lost, Refused
from fl_server.rounds.ending import cancel, end_by_fault, same_failure, training_diverges
from fl_server.rounds.sampling import by_id
from fl_server.rounds.secure import abandon, begin_signing, close_stage, close_stage_if_done, masks_open, too_few
from fl_server.rounds.selecting import draw_replacements, learn, lost_states, restart_round, select
from fl_server.rounds.state import BEFORE_MASKS, Phase, Result, RoundState, UnexpectedEvent, replace


def admit(state: RoundState, event: ev.UpdateAdmitted) -> Result:
    """Updates that count towards the goal."""
    clients = {client for client, _ in event.updates}
    if strangers := clients - state.drawn:
        raise UnexpectedEvent(event, state, f"{min(strangers)} is not of this round's cohort")
    again = [client for client in clients if state.arrivals.has(client)]
    if again or len(clients) < len(event.updates):
        twice = [client for client, times in Counter(client for client, _ in event.updates).items() if times > 1]
        raise UnexpectedEvent(event, state, f"{min(again + twice)} was admitted before")
    admitted = state.arrivals.with_all(event.updates)
    out = state.out if clients.isdisjoint(state.out) else state.out - clients
    return close_if_done(replace(state, admitted=admitted, out=out, failed=state.failed.without(clients)))


def refuse(state: RoundState, event: ev.UpdateRefused) -> Result:
    """An update that does not count, and none of its client will in this round."""
    client = event.client
    if not state.undecided(state.place_of(client), client) or client not in state.drawn:
        raise UnexpectedEvent(event, state, f"no update of {client} is expected")
    worked = state.works(client)
    state = replace(
        state,
        out=state.out | {client},
        refused=state.refused.added(client, Refused(event.fault, event.why)),
        failed=state.failed.without({client}),
    )
    if fault := training_diverges(state):
        return end_by_fault(state, fault)
    return close_if_done(state) if worked and state.phase is Phase.COLLECTING else (state, ())


def admit_while_waiting(state: RoundState, event: ev.UpdateAdmitted) -> Result:
    """A client of the cohort delivered while no client was outstanding: x_t is unchanged, so its update counts."""
    state, effects = admit(replace(state, phase=Phase.COLLECTING), event)
    # The waiting attempt was never opened, so it has missed no quorum.
    return state, tuple(effect for effect in effects if not isinstance(effect, ef.QuorumMissed))


def client_out(state: RoundState, event: ev.ClientDroppedOut) -> Result:
    """An outstanding client will not deliver."""
    if not state.works(event.client):
        raise UnexpectedEvent(event, state, f"{event.client} is not outstanding")
    return close_if_done(_without(state, event.client))


def _without(state: RoundState, client: str) -> RoundState:
    """A client at work that will not deliver. What it answered before its masked update is of no use either."""
    answered = state.answered - {client} if state.phase in BEFORE_MASKS else state.answered
    return replace(state, out=state.out | {client}, answered=answered)


def work_failed(state: RoundState, event: ev.WorkFailed) -> Result:
    """The work of an outstanding client has failed. The run fails too if the fault is its own."""
    client = event.client
    if not state.works(client):
        raise UnexpectedEvent(event, state, f"{client} is not outstanding")
    times = state.failed[client].times + 1 if client in state.failed else 1
    failed = Failed(event.why, event.cause, event.not_finite, event.repeats, times)
    state = replace(_without(state, client), failed=state.failed.added(client, failed))
    if event.not_finite and (fault := training_diverges(state)):
        return end_by_fault(state, fault)
    return close_if_done(state)


def state_lost(state: RoundState, event: ev.StateLost) -> Result:
    """A client at work cannot start from its state.

    Where the server keeps the states' sum all states must be reset, which costs every client: it is done if the last
    reset is long ago, else the run goes on without this client until then. Other states restart alone.
    """
    client = event.client
    if not state.works(client):
        raise UnexpectedEvent(event, state, f"{client} is not outstanding")
    if state.policy.population:
        state = replace(state, lost=state.lost.added(client, Lost(event.why, event.left_out)))
        if state.may_restart_states:
            return restart_round(state, lost_states(state), states=True)
    elif not event.left_out:
        return state, (ef.SendWork(client),)
    return conclude_failure(state, client, f"state_lost: {event.why}")


def client_restarted(state: RoundState, event: ev.ClientRestarted) -> Result:
    """Send a client at work its work again, unless too many of its processes had it: then the work has failed."""
    client = event.client
    if not state.works(client):
        raise UnexpectedEvent(event, state, f"{client} is not outstanding")
    state = replace(state, restarts=state.restarts.added(client, state.restarts.get(client, 0) + 1))
    if not state.restarts_too_often(client):
        return state, (ef.SendWork(client),)
    return conclude_failure(state, client, too_many_processes(state.policy.most_processes))


def too_many_processes(most: int, what: str = "assignment") -> str:
    """Why work has failed that was sent to so many processes."""
    had = f"{ev.counted(most, 'process', 'processes')} of it had the {what}"
    return f"the daemon restarted while it worked: {had}, and none answered"


def conclude_failure(state: RoundState, client: str, why: str) -> Result:
    """The work of an outstanding client has failed though it has not reported it."""
    state, effects = work_failed(state, ev.WorkFailed(client, why))
    return state, (ef.RecordFailure(client, why), *effects)


def client_back(state: RoundState, event: ev.ClientReturned) -> Result:
    """A client that had dropped out can deliver again."""
    if not state.may_return(event.client):
        raise UnexpectedEvent(event, state, f"{event.client} is not out, or is asked no more in this round")
    return replace(state, out=state.out - {event.client}), ()


def client_returns(state: RoundState, event: ev.ClientReturned) -> Result:
    """No client was left to draw, and one of the cohort returned: the attempt continues with it."""
    state, _ = client_back(state, event)
    return replace(state, phase=Phase.COLLECTING), (ef.OpenAttempt(state.round, state.exchange, state.attempt, ()),)


def close_if_done(state: RoundState) -> Result:
    """Close at the goal, or with a quorum when no client can deliver; below the quorum start the next attempt."""
    if state.policy.buffered:
        return collect(state)
    if state.staged:
        return close_stage_if_done(state)
    if state.fixed:
        return close_as_fixed(state)
    count = len(state.admitted)
    if count >= state.goal:
        return close(state)
    if state.working:
        return state, ()
    return close(state) if may_close(state) else next_attempt(state)


def may_close(state: RoundState) -> bool:
    """Whether the updates that are here may make a model: a quorum, whose masks the others can open."""
    if len(state.admitted) < state.quorum:
        return False
    return not state.policy.secure or masks_open(state)


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
        state, f"the bytes of accepted updates are lost, {missing} of {len(state.fixed)}, and did not come again"
    )


def deadline(state: RoundState, event: ev.DeadlinePassed) -> Result:
    """Close with a quorum; else start the next attempt.

    Clients that miss a deadline which at least as many kept are reported. Else it is too short for all, which is no
    client's fault.
    """
    del event
    if state.staged:
        return close_stage(state)
    late = (ef.DeadlineMissed(by_id(state.outstanding)),) if 0 < state.working <= len(state.admitted) else ()
    if state.fixed:
        state, effects = give_up_fixed(state)
    elif may_close(state):
        state, effects = close(state)
    else:
        # One client that hangs must not keep the clients that failed from being drawn again.
        untried = set(state.candidates) - state.drawn
        state, effects = next_attempt(state, frozenset() if untried else drawn_again(state))
    return state, (*effects, *late)


def drawn_again(state: RoundState) -> frozenset[str]:
    """Clients that dropped out, are present and may be drawn again."""
    return frozenset(client for client in state.out & set(state.eligible) if not state.barred(client))


def retry(state: RoundState, event: ev.RetryDue) -> Result:
    """Draw again, also clients that failed. If all were refused, the round is redrawn: they may deliver then.

    Quarantine limits how often: a client that is refused in several rounds in a row is not eligible.
    """
    if state.resting:
        return select(replace(state, resting=False))
    if not state.goal:
        raise UnexpectedEvent(event, state, "this round has not been drawn, so nothing waits for a retry")
    if only_refused_are_left(state):
        client, refused = next(iter(state.refused.items()))
        return restart_round(
            state, f"{len(state.refused)} of its clients were refused, and no other is left; {client}: {refused.why}"
        )
    if state.policy.buffered:
        return collect(state, drawn_again(state))
    state = replace(state, attempt=state.attempt + 1)
    return draw_replacements(state, drawn_again(state)) if state.settled else (state, ())


def only_refused_are_left(state: RoundState) -> bool:
    """Whether each client of the round has delivered or is not drawn again for it, and there is no other."""
    if not state.settled or not state.refused or set(state.candidates) - state.drawn - state.delivered:
        return False
    return all(state.barred(client) or client in state.delivered for client in state.drawn)


def next_attempt(state: RoundState, again: frozenset[str] = frozenset()) -> Result:
    """Start the next attempt, unless the task's code fails everywhere. again: as in `draw_replacements`."""
    if fault := same_failure(state, again):
        return end_by_fault(state, fault)
    if state.policy.secure:
        return abandon(state, too_few(state, state.admitted, state.sharers))
    missed = ef.QuorumMissed(state.round, state.exchange, state.attempt, len(state.admitted), state.quorum)
    if state.exchange:
        # The cohort of a later exchange is the accepted list of the one before: there are no replacements.
        state, effects = restart_round(state)
    else:
        state, effects = draw_replacements(replace(state, attempt=state.attempt + 1), again)
    return state, (missed, *effects)


def close(state: RoundState) -> Result:
    """Accept the first `goal` updates to arrive, sorted by id bytes, and then cancel the outstanding clients.

    The order matters: a cancelled client drops its work, so a restart must not be able to accept it later.
    """
    accepted = tuple(sorted(state.admitted[: state.goal], key=lambda entry: entry[0].encode()))
    if state.policy.secure:
        return begin_signing(replace(state, accepted=accepted))
    cancelled = cancel(state)
    state = replace(
        learn(state), accepted=accepted, drawn=state.drawn | state.cancelled,
        out=state.out | state.outstanding | state.cancelled, fixed=(), cancelled=frozenset(),
    )  # fmt: skip
    if state.exchange + 1 < state.policy.exchanges:
        return replace(state, phase=Phase.REDUCING), (ef.ReduceExchange(accepted), *cancelled)
    return replace(state, phase=Phase.STEPPING), (ef.ComputeStep(accepted), *cancelled)


def drop_culprits(state: RoundState, event: ev.CulpritsFound) -> Result:
    """Reopen the exchange as if these updates had been refused: it closes without them, or others are drawn."""
    gone = {client for client, _ in event.culprits}
    if unknown := gone - {client for client, _ in state.accepted}:
        raise UnexpectedEvent(event, state, f"{min(unknown)} is not on the accepted list")
    drop = ef.DropCulprits(state.round, state.exchange, event.culprits, event.fault)
    admitted = tuple(entry for entry in state.admitted if entry[0] not in gone)
    refused = state.refused
    for client, why in event.culprits:
        refused = refused.added(client, Refused(event.fault, why))
    state = replace(
        state, phase=Phase.COLLECTING, admitted=admitted, accepted=(), out=state.out | gone, repeated=True,
        refused=refused,
    )  # fmt: skip
    if state.ending is not None:
        return replace(state, phase=Phase.ENDED), (drop, ef.EndRun(*state.ending))
    if fault := training_diverges(state):
        state, effects = end_by_fault(state, fault)
    elif state.states_lost:
        state, effects = restart_round(state, state.states_lost, states=True)
    else:
        state, effects = close_if_done(state)
    return state, (drop, *effects)


def next_exchange(state: RoundState, event: ev.ExchangeReduced) -> Result:
    """Open the next exchange for the accepted clients of the last one."""
    del event
    if state.states_lost:
        return restart_round(state, state.states_lost, states=True)
    cohort = tuple(client for client, _ in state.accepted)
    state = replace(
        state, phase=Phase.COLLECTING, exchange=state.exchange + 1, goal=len(cohort), drawn=frozenset(cohort),
        out=frozenset(), failed=ByClient(), restarts=ByClient(), refused=ByClient(), admitted=(), repeated=False,
    )  # fmt: skip
    return state, (ef.OpenAttempt(state.round, state.exchange, state.attempt, cohort),)
