"""Rules for events of any phase: roster changes, pause, resume, extension, and the end of a run."""

from __future__ import annotations

from dataclasses import replace

from fl_server.rounds.committing import go_on
from fl_server.rounds.events import (
    EndRequested,
    EndRun,
    Extended,
    PauseRequested,
    RestartRound,
    ResumeRequested,
    RosterChanged,
)
from fl_server.rounds.sampling import by_id
from fl_server.rounds.selecting import cancel, redraw, select
from fl_server.rounds.state import Phase, Result, RoundState, UnexpectedEvent


def roster(state: RoundState, event: RosterChanged) -> Result:
    """Take the new list of eligible clients, and draw if the run waits for clients."""
    state = replace(state, eligible=by_id(event.eligible), settled=event.settled, shut_out=event.shut_out)
    return go_on(state) if state.phase is Phase.SELECTING else (state, ())


def pause(state: RoundState, event: PauseRequested) -> Result:
    """Start no new round."""
    del event
    return replace(state, paused=True), ()


def resume(state: RoundState, event: ResumeRequested) -> Result:
    """Start new rounds again."""
    del event
    state = replace(state, paused=False)
    return select(state) if state.phase is Phase.SELECTING else (state, ())


def extend(state: RoundState, event: Extended) -> Result:
    """Change the number of rounds."""
    if event.rounds <= state.round:
        raise UnexpectedEvent(event, state, f"expected more than the {state.round} rounds that are done")
    return replace(state, rounds=event.rounds), ()


def reopen(state: RoundState, event: Extended) -> Result:
    """Reopen a completed run that gets more rounds."""
    if state.ending is None or state.ending[0] != "completed":
        raise UnexpectedEvent(event, state, "only a completed run can be extended")
    state, _ = extend(state, event)
    return _opened_again(state)


def go_on_after_failure(state: RoundState, event: ResumeRequested) -> Result:
    """Resume a failed run from its last committed model."""
    if state.ending is None or state.ending[0] != "failed":
        raise UnexpectedEvent(event, state, "only a failed run can go on as it is")
    return _opened_again(replace(state, paused=False))


def _opened_again(state: RoundState) -> Result:
    """Reopen an ended run. Its unfinished round is redrawn, because its clients were cancelled."""
    if not state.goal:
        return go_on(replace(state, ending=None))
    restart = RestartRound(state.round, "the run had ended in it", states=False)
    state, commands = go_on(replace(redraw(state), ending=None))
    return state, (restart, *commands)


def end_now(state: RoundState, event: EndRequested) -> Result:
    """End the run at once, and give up the current round."""
    ending = (event.status, event.reason)
    ended = replace(state, phase=Phase.ENDED, ending=ending, out=state.out | state.outstanding)
    return ended, (*cancel(state), EndRun(*ending))


def end_later(state: RoundState, event: EndRequested) -> Result:
    """End the run after the commit of the current step; at once after an error."""
    return end_now(state, event) if event.status == "failed" else end_after_commit(state, event)


def end_after_commit(state: RoundState, event: EndRequested) -> Result:
    """End the run after the commit under way, which may be durable already; at once if the commit itself failed."""
    if event.broken:
        return end_now(state, event)
    return replace(state, ending=(event.status, event.reason)), ()
