"""What the roster and operators say to a run, in whatever phase it is. One part of `rounds.py`."""

from __future__ import annotations

from dataclasses import replace

from fl_server.events import (
    End,
    EndRequested,
    Extended,
    PauseRequested,
    RestartRound,
    ResumeRequested,
    RosterChanged,
)
from fl_server.round_committing import go_on
from fl_server.round_drawing import anew, cancel, select
from fl_server.round_rule import Result, UnexpectedEvent
from fl_server.round_state import Phase, RoundState
from fl_server.sampling import by_id


def roster(state: RoundState, event: RosterChanged) -> Result:
    """Who may be drawn has changed."""
    state = replace(state, eligible=by_id(event.eligible), settled=event.settled)
    return go_on(state) if state.phase is Phase.SELECTING else (state, ())


def pause(state: RoundState, event: PauseRequested) -> Result:
    """No new round from now on."""
    del event
    return replace(state, paused=True), ()


def resume(state: RoundState, event: ResumeRequested) -> Result:
    """Rounds go on."""
    del event
    state = replace(state, paused=False)
    return select(state) if state.phase is Phase.SELECTING else (state, ())


def extend(state: RoundState, event: Extended) -> Result:
    """More rounds, or fewer."""
    if event.rounds <= state.round:
        raise UnexpectedEvent(event, state, f"expected more than the {state.round} rounds that are done")
    return replace(state, rounds=event.rounds), ()


def reopen(state: RoundState, event: Extended) -> Result:
    """A completed run goes on."""
    if state.ending is None or state.ending[0] != "completed":
        raise UnexpectedEvent(event, state, "only a completed run can be extended")
    state, _ = extend(state, event)
    return _opened_again(state)


def go_on_after_failure(state: RoundState, event: ResumeRequested) -> Result:
    """A failed run goes on from its last committed model."""
    if state.ending is None or state.ending[0] != "failed":
        raise UnexpectedEvent(event, state, "only a failed run can go on as it is")
    return _opened_again(replace(state, paused=False))


def _opened_again(state: RoundState) -> Result:
    """An ended run goes on. A round that the end cut short had its clients cancelled: it is drawn anew."""
    if not state.goal:
        return go_on(replace(state, ending=None))
    restart = RestartRound(state.round, "the run had ended in it", states=False)
    state, commands = go_on(replace(anew(state), ending=None))
    return state, (restart, *commands)


def end_now(state: RoundState, event: EndRequested) -> Result:
    """The round under way is given up."""
    ending = (event.status, event.reason)
    ended = replace(state, phase=Phase.ENDED, ending=ending, out=state.out | state.outstanding)
    return ended, (*cancel(state), End(*ending))


def end_later(state: RoundState, event: EndRequested) -> Result:
    """A step under way is finished and committed first; an error cannot wait for that."""
    if event.status == "failed":
        return end_now(state, event)
    return replace(state, ending=(event.status, event.reason)), ()
