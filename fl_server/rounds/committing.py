"""Rules from the server step to the next round: commit, evaluation, the end of the run."""

from __future__ import annotations

from dataclasses import replace

from fl_server.rounds.events import (
    Announce,
    Commit,
    EndRun,
    EndStatus,
    Evaluated,
    ModelCommitted,
    RestartRound,
    Source,
    StepComputed,
)
from fl_server.rounds.selecting import next_round, select
from fl_server.rounds.state import Phase, Result, RoundState


def stepped(state: RoundState, event: StepComputed) -> Result:
    """Commit the new model."""
    del event
    return replace(state, phase=Phase.COMMITTING), (Commit(),)


def committed(state: RoundState, event: ModelCommitted) -> Result:
    """Announce the round, and start the next one unless an evaluation is awaited.

    An evaluation that is due waits for an earlier one, and so does the next round: else the models that wait for their
    evaluation would pile up.
    """
    evaluate, ask_clients = evaluation_due(state, state.round), clients_due(state, state.round)
    if state.policy.population:
        state = replace(state, members=state.members | {client for client, _ in state.accepted})
    announce = Announce(state.round, evaluate, ask_clients)
    awaited = awaited_evaluations(state, state.round)
    if evaluate and event.evaluating:
        awaited |= {"earlier"}
    if state.ending is not None and state.ending[0] != "completed":
        awaited = frozenset()  # the run ends at once; an evaluation goes on after its end
    if awaited:
        return replace(next_round(state), phase=Phase.EVALUATING, awaited=awaited), (announce,)
    state, commands = go_on(next_round(state))
    return state, (announce, *commands)


def evaluation_due(state: RoundState, round: int) -> bool:
    """Whether the server evaluates a committed round: every `evaluate_every` rounds, and the last one."""
    return _due(state, round, state.policy.evaluate_every)


def clients_due(state: RoundState, round: int) -> bool:
    """Whether clients evaluate a committed round: every `ask_clients_every` rounds, and the last one."""
    return _due(state, round, state.policy.ask_clients_every)


def awaited_evaluations(state: RoundState, round: int) -> frozenset[Source]:
    """The evaluations that the run waits for: all of the last round, else those that its stop rule needs."""
    last, policy = _is_last(state, round), state.policy
    server = evaluation_due(state, round) and (last or policy.await_evaluation)
    clients = clients_due(state, round) and (last or policy.await_clients)
    by: dict[Source, bool] = {"server": server, "clients": clients}
    return frozenset(source for source, awaited in by.items() if awaited)


def _due(state: RoundState, round: int, every: int) -> bool:
    return every > 0 and (_is_last(state, round) or (round + 1) % every == 0)


def _is_last(state: RoundState, round: int) -> bool:
    return round + 1 >= state.rounds or state.ending is not None


def evaluated(state: RoundState, event: Evaluated) -> Result:
    """Continue once all awaited evaluations are finished."""
    source: Source = event.by
    if event.round not in (None, state.round - 1):
        # It ran during a later round, so it is not the one that a run waits for at its end.
        if event.by == "clients":
            return state, ()
        source = "earlier"
    state = replace(state, awaited=state.awaited - {source})
    return (state, ()) if state.awaited else go_on(state)


def go_on(state: RoundState) -> Result:
    """Between two rounds: end the run if that is due, else select."""
    if state.ending is not None:
        return replace(state, phase=Phase.ENDED), (EndRun(*state.ending),)
    if state.round >= state.rounds:
        ending: tuple[EndStatus, str] = ("completed", f"{state.rounds} rounds are done")
        return replace(state, phase=Phase.ENDED, ending=ending), (EndRun(*ending),)
    if state.states_lost:
        restart = RestartRound(state.round, state.states_lost, states=True)
        state, commands = select(replace(state, phase=Phase.SELECTING, members=frozenset(), states_lost=""))
        return state, (restart, *commands)
    return select(replace(state, phase=Phase.SELECTING))
