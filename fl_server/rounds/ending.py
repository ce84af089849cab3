"""Rules for the end of a run: by an operator, an error, its time, or a fault of its own."""

from __future__ import annotations

from dataclasses import replace

from fl_server.rounds.effects import Cancel, Effect, EndRun
from fl_server.rounds.events import EndRequested, TimeUsed
from fl_server.rounds.failing import RunFault
from fl_server.rounds.sampling import by_id
from fl_server.rounds.state import Phase, Result, RoundState


def cancel(state: RoundState) -> tuple[Effect, ...]:
    """The effect that cancels the outstanding clients, if there are any."""
    return (Cancel(by_id(state.outstanding), state.exchange),) if state.working else ()


def end(state: RoundState, event: EndRequested) -> Result:
    """End the run: at once, or after the commit of a model that is being computed."""
    if state.phase is Phase.STEPPING and event.status != "failed":
        return _end_after_commit(state, event)
    if state.phase is Phase.COMMITTING and not event.broken:  # the model may be durable already
        return _end_after_commit(state, event)
    return end_now(state, event)


def end_now(state: RoundState, event: EndRequested) -> Result:
    """End the run at once, and give up the current round."""
    ending = (event.status, event.reason)
    ended = replace(state, phase=Phase.ENDED, ending=ending, out=state.out | state.outstanding)
    return ended, (*cancel(state), EndRun(*ending))


def end_by_fault(state: RoundState, fault: RunFault) -> Result:
    """The run fails by a fault of its own."""
    failed_by, why = fault
    return end_now(replace(state, failed_by=failed_by), EndRequested("failed", why))


def _end_after_commit(state: RoundState, event: EndRequested) -> Result:
    return replace(state, ending=(event.status, event.reason)), ()


def time_used(state: RoundState, event: TimeUsed) -> Result:
    """End the run at its limit of time."""
    state = replace(state, elapsed_s=event.seconds)
    if not state.wall_time_s or state.elapsed_s < state.wall_time_s or state.ending is not None:
        return state, ()
    return end(state, EndRequested("completed", f"its {state.wall_time_s:g} s are over"))
