"""Rules of a run with `close = "buffer"`: the server steps when `goal` updates are in its buffer (FedBuff).

Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022.

Clients work on while a model is computed and after it is committed, each from the version that it was sent. A version
is the number of a model: round r begins with version r, and its step makes version r + 1. A client has at most one
update for each version. The phases are those of every run, but clients may deliver in each of them:

    SELECTING --opened--> COLLECTING --full--> STEPPING --> COMMITTING --> (EVALUATING) --> SELECTING
                          (idle clients are drawn into the free slots)

`RoundState.drawn` are the clients that have work, and `work` says which. Those in `out` have no slot: they are lost,
have failed, or have missed their deadline. What they deliver counts all the same until they get other work.
"""

from __future__ import annotations

from fl_server.rounds import effects as ef
from fl_server.rounds.by_client import BufferedUpdate, ByClient, Refused, Work
from fl_server.rounds.ending import cancel, end_by_fault, ended, no_client_delivers, same_failure, training_diverges
from fl_server.rounds.events import ClientReturned, CulpritsFound, DeadlinePassed, RosterChanged, UpdateAdmitted
from fl_server.rounds.sampling import Draw, by_id, draw_fixed
from fl_server.rounds.state import Phase, Result, RoundState, UnexpectedEvent, replace


def open_round(state: RoundState) -> Result:
    """Open the buffer of a round, and give its version to clients in the free slots."""
    if not state.enough and not state.working and len(state.buffer) < state.policy.goal:
        return state, (ef.AwaitClients(state.policy.min_clients, len(state.candidates)),)
    state = replace(state, phase=Phase.COLLECTING, goal=state.policy.goal, draws=state.draws + 1)
    state, opened = _drawn(state, frozenset())
    state, effects = _step_or_wait(state)
    return state, (opened, *effects)


def collect(state: RoundState, again: frozenset[str] = frozenset()) -> Result:
    """Go on after a change: step with a full buffer, else draw idle clients into the free slots.

    While a model is computed nobody is drawn, because its version is about to be an older one.

    again: clients whose work of this version has ended without an update, and that may be drawn for it once more.
    """
    if state.phase is not Phase.COLLECTING and not (state.phase is Phase.SELECTING and state.goal):
        return state, ()
    state = replace(state, phase=Phase.COLLECTING)
    if len(state.buffer) >= state.goal:
        return _step(state)
    later, opened = _drawn(replace(state, attempt=state.attempt + 1), again)
    return (later, (opened,)) if opened.cohort else _step_or_wait(state)


def idle(state: RoundState, again: frozenset[str] = frozenset()) -> list[str]:
    """Eligible clients without work that have not had the version of this round, but for those in `again`."""
    had = {client for client, work in state.work.items() if work.version == state.round} - again
    not_idle = had | state.delivered | (state.drawn - state.out)
    return [client for client in state.candidates if client not in not_idle]


def _drawn(state: RoundState, again: frozenset[str]) -> tuple[RoundState, ef.OpenAttempt]:
    """Draw idle clients into the free slots; the seed, the round and the number of the attempt decide who it is."""
    free, cohort = state.policy.concurrency - state.working, tuple[str, ...]()
    if free > 0 and state.settled:
        cohort = draw_fixed(idle(state, again), free, Draw(state.policy.seed, state.round, state.attempt))
    work = dict[str, Work].fromkeys(cohort, Work(state.round, state.attempt))
    state = replace(
        state, drawn=state.drawn.union(cohort), out=state.out.difference(cohort), work=ByClient({**state.work, **work})
    )
    return state, ef.OpenAttempt(state.round, 0, state.attempt, cohort)


def _step_or_wait(state: RoundState) -> Result:
    """Step with a full buffer; wait if nobody works, unless the run's own fault keeps all from delivering."""
    if len(state.buffer) >= state.goal:
        return _step(state)
    if state.working:
        return state, ()
    if fault := no_client_delivers(state) or same_failure(state):
        return end_by_fault(state, fault)
    waits = ef.AwaitClients(state.goal - len(state.buffer), len(idle(state)))
    return replace(state, phase=Phase.SELECTING), (waits, ef.RetryLater())


def _step(state: RoundState) -> Result:
    """Take the first `goal` updates out of the buffer. Nobody is cancelled."""
    taken, rest = state.buffer[: state.goal], state.buffer[state.goal :]
    accepted = tuple((update.client, update.digest) for update in taken)
    versions = tuple(update.version for update in taken)
    state = replace(state, phase=Phase.STEPPING, buffer=rest, accepted=accepted, versions=versions)
    return state, (ef.ComputeStep(accepted, versions),)


def admit(state: RoundState, event: UpdateAdmitted) -> Result:
    """Updates for the buffer, each of the version that its client works from. Their clients are idle then."""
    for client, digest in event.updates:
        if client not in state.work or not state.undecided(state.place_of(client), client):
            raise UnexpectedEvent(event, state, f"{client} has no work, has delivered it, or is too late with it")
        update, done = BufferedUpdate(client, state.work[client].version, digest), frozenset({client})
        state = replace(_without_work(state, done), buffer=(*state.buffer, update), failed=state.failed.without(done))
    return collect(state)


def _without_work(state: RoundState, clients: frozenset[str]) -> RoundState:
    return replace(
        state, drawn=state.drawn - clients, out=state.out - clients, work=state.work.without(clients),
        restarts=state.restarts.without(clients),
    )  # fmt: skip


def client_back(state: RoundState, event: ClientReturned) -> Result:
    """A client that had lost its slot goes on with its work: a slot is free."""
    if not state.may_return(event.client):
        raise UnexpectedEvent(event, state, f"{event.client} is not out, or is asked no more for this work")
    waits = state.phase is Phase.SELECTING and state.goal
    phase = Phase.COLLECTING if waits else state.phase
    return replace(state, phase=phase, out=state.out - {event.client}), ()


def roster(state: RoundState, event: RosterChanged) -> Result:
    """Take the new list of eligible clients while the buffer is open: some of them may be drawn."""
    return collect(replace(state, eligible=by_id(event.eligible), settled=event.settled, shut_out=event.shut_out))


def deadline(state: RoundState, event: DeadlinePassed) -> Result:
    """The time of one draw is over: its clients that have not delivered lose their slots.

    They are reported if others have delivered meanwhile as often. Else the deadline is too short for all, which is no
    client's fault.
    """
    of_draw = {
        client: Work(work.version, work.attempt, late=True)
        for client, work in state.work.items()
        if (work.version, work.attempt) == (event.round, event.attempt)
    }
    late = by_id(client for client in of_draw if state.works(client))
    kept = event.round < state.round or len(late) <= len(state.buffer)
    state = replace(state, work=ByClient({**state.work, **of_draw}), out=state.out.union(late))
    if not late:
        return state, ()
    state, effects = collect(state)
    return state, (*effects, *((ef.DeadlineMissed(late),) if kept else ()))


def drop_culprits(state: RoundState, event: CulpritsFound) -> Result:
    """Take these clients' updates out of the step; the others come first in the buffer again."""
    why_of = dict(event.culprits)
    if unknown := why_of.keys() - {client for client, _ in state.accepted}:
        raise UnexpectedEvent(event, state, f"{min(unknown)} is not on the accepted list")
    taken = [
        BufferedUpdate(client, version, digest)
        for (client, digest), version in zip(state.accepted, state.versions, strict=True)
    ]
    culprits = [update for update in taken if update.client in why_of]
    drop = ef.DropCulprits(
        state.round, 0, tuple((update.client, why_of[update.client]) for update in culprits), event.fault,
        tuple(update.version for update in culprits),
    )  # fmt: skip
    refused = state.refused
    for client, why in event.culprits:
        refused = refused.added(client, Refused(event.fault, why))
    kept = tuple(update for update in taken if update.client not in why_of)
    state = replace(
        state, phase=Phase.COLLECTING, buffer=kept + state.buffer, accepted=(), versions=(), refused=refused
    )  # fmt: skip
    effects: tuple[ef.Effect, ...]
    if (ending := state.ending) is not None:
        state, effects = ended(state, ending), (*cancel(state), ef.EndRun(*ending))
    elif fault := training_diverges(state):
        state, effects = end_by_fault(state, fault)
    else:
        state, effects = collect(state)
    return state, (drop, *effects)


def carried_over(before: RoundState, state: RoundState) -> RoundState:
    """The state of the next round, with what goes on: the rest of the buffer, and work whose update can still count.

    before: when the round was committed, or is redrawn. state: the next round, without clients.
    """
    state = replace(state, buffer=before.buffer)
    work = ByClient(
        {
            client: work
            for client, work in before.work.items()
            if client not in before.refused and not state.too_stale(work.version)
        }
    )
    return replace(
        state, drawn=frozenset(work), out=before.out.intersection(work), work=work,
        restarts=before.restarts.without(before.restarts.keys() - work.keys()),
    )  # fmt: skip


def without_version(state: RoundState) -> RoundState:
    """The state without what there is of the current version: its round is redrawn."""
    newest = frozenset(client for client, work in state.work.items() if work.version == state.round)
    buffer = tuple(update for update in state.buffer if update.version != state.round)
    return replace(_without_work(state, newest), buffer=buffer)
