"""From the server step to the next round: commit, evaluation, the end of the run. One part of `rounds.py`."""

from __future__ import annotations

from dataclasses import replace

from fl_server.events import Announce, Commit, Committed, End, EndStatus, Evaluated, RestartRound, Source, Stepped
from fl_server.round_drawing import next_round, select
from fl_server.round_rule import Result
from fl_server.round_state import Phase, RoundState


def stepped(state: RoundState, event: Stepped) -> Result:
    """The new model is there: make it durable."""
    del event
    return replace(state, phase=Phase.COMMITTING), (Commit(),)


def committed(state: RoundState, event: Committed) -> Result:
    """The round is done: tell, evaluate, go on."""
    del event
    evaluate, ask = evaluation_due(state, state.round), clients_due(state, state.round)
    if state.policy.population:
        state = replace(state, members=state.members | {client for client, _ in state.accepted})
    announce = Announce(state.round, evaluate, ask)
    if awaited := awaited_evaluations(state, state.round):
        return replace(next_round(state), phase=Phase.EVALUATING, awaited=awaited), (announce,)
    state, commands = go_on(next_round(state))
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


def evaluated(state: RoundState, event: Evaluated) -> Result:
    """One of the evaluations that were waited for."""
    state = replace(state, awaited=state.awaited - {event.by})
    return (state, ()) if state.awaited else go_on(state)


def go_on(state: RoundState) -> Result:
    """Between two rounds: end if the run is to end, else select."""
    if state.ending is not None:
        return replace(state, phase=Phase.ENDED), (End(*state.ending),)
    if state.round >= state.rounds:
        ending: tuple[EndStatus, str] = ("completed", f"{state.rounds} rounds are done")
        return replace(state, phase=Phase.ENDED, ending=ending), (End(*ending),)
    if state.states_lost:
        restart = RestartRound(state.round, state.states_lost, states=True)
        state, commands = select(replace(state, phase=Phase.SELECTING, members=frozenset(), states_lost=""))
        return state, (restart, *commands)
    return select(replace(state, phase=Phase.SELECTING))
