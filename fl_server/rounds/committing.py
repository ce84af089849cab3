"""Rules from the server step to the next round: commit, evaluation, the end of the run."""

from __future__ import annotations

from fl_server.rounds.effects import Announce, Commit, EndRun
from fl_server.rounds.ending import cancel, cancelled, end, ended
from fl_server.rounds.events import EndRequested, Evaluated, ModelCommitted, Source, StepComputed, counted
from fl_server.rounds.metrics import has_evaluation, missing_metric, stop_reason
from fl_server.rounds.sampling import by_id
from fl_server.rounds.selecting import lost_states, next_round, restart_round, select
from fl_server.rounds.state import Phase, Result, RoundState, replace


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
    counted = frozenset(client for client, _ in state.accepted)
    members = state.members | counted if state.policy.population else state.members
    state = replace(
        state, members=members, epoch_rounds=state.epoch_rounds + 1, lost=state.lost.without(counted)
    )  # fmt: skip
    announce = Announce(state.round, evaluate, ask_clients)
    following = next_round(state)
    withdrawn = cancelled(state, by_id(state.outstanding - following.drawn)) if state.policy.buffered else ()
    awaited = awaited_evaluations(state, state.round)
    if evaluate and event.evaluating:
        awaited |= {"earlier"}
    if state.ending is not None and state.ending[0] != "completed":
        awaited = frozenset()  # the run ends at once; an evaluation goes on after its end
    if awaited:
        return replace(following, phase=Phase.EVALUATING, awaited=awaited), (announce, *withdrawn)
    state, effects = go_on(following)
    return state, (announce, *withdrawn, *effects)


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
    """Judge an evaluation by the stop rules; continue once all awaited evaluations are finished."""
    round_ = state.round - 1 if event.round is None else event.round
    if end_ := _verdict(state, event, round_):
        return end(state, end_)
    state = _judged(state, event, round_)
    if state.phase is not Phase.EVALUATING:
        return state, ()
    source: Source = event.by
    if round_ != state.round - 1:
        # It ran during a later round, so it is not the one that a run waits for at its end.
        if event.by == "clients":
            return state, ()
        source = "earlier"
    state = replace(state, awaited=state.awaited - {source})
    return (state, ()) if state.awaited else go_on(state)


def _verdict(state: RoundState, event: Evaluated, round: int) -> EndRequested | None:
    """The end of the run because of an evaluation: it lacks the metric of the stop rules, or meets one of them."""
    stop, metrics = state.policy.stop, event.metrics
    if not stop.uses_metrics:
        return None
    if not state.metric_seen and (missing := missing_metric(stop.criterion.metric, metrics, event.by)):
        return EndRequested("failed", missing)
    if round >= state.judged_from and has_evaluation(metrics, stop.criterion.metric):
        reason = stop_reason(stop, [(round, metrics)], state.judged)
        return None if reason is None else EndRequested("completed", reason)
    return None


def _judged(state: RoundState, event: Evaluated, round: int) -> RoundState:
    if not state.policy.stop.uses_metrics:
        return state
    criterion, metrics = state.policy.stop.criterion, event.metrics
    seen = state.metric_seen or criterion.metric in metrics
    if round >= state.judged_from and has_evaluation(metrics, criterion.metric):
        state = replace(state, judged=state.judged.after(criterion, (round, metrics)), judged_from=round + 1)
    return replace(state, metric_seen=seen)


def go_on(state: RoundState) -> Result:
    """Between two rounds: end the run if that is due, else select."""
    ending = state.ending
    if ending is None and state.round >= state.rounds:
        ending = ("completed", f"{counted(state.rounds, 'round')} {'is' if state.rounds == 1 else 'are'} done")
    if ending is not None:
        return ended(state, ending), (*cancel(state), EndRun(*ending))
    state = replace(state, phase=Phase.SELECTING)
    if why := state.states_lost or (lost_states(state) if state.lost and state.may_restart_states else ""):
        return restart_round(state, why, states=True)
    return select(state)
