"""Rules for events of any phase: roster changes, pause, resume, extension, and the end of a run."""

from __future__ import annotations

from dataclasses import replace

from fl_server.rounds.committing import go_on
from fl_server.rounds.effects import RestartRound
from fl_server.rounds.events import Extended, PauseRequested, ResumeRequested, RosterChanged
from fl_server.rounds.sampling import by_id
from fl_server.rounds.selecting import redraw, select
from fl_server.rounds.state import Phase, Result, RoundState, UnexpectedEvent
from fl_server.rounds.stop_rules import Judged


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
    """Change the number of rounds and the limit of time. Earlier evaluations end the run no more."""
    if event.rounds <= state.round:
        raise UnexpectedEvent(event, state, f"expected more than the {state.round} rounds that are done")
    return judged_anew(replace(state, rounds=event.rounds, wall_time_s=event.wall_time_s)), ()


def judged_anew(state: RoundState) -> RoundState:
    """Count evaluations for the stop rules from this round on."""
    return replace(state, judged=Judged(), judged_from=state.round)


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
    return _opened_again(judged_anew(replace(state, paused=False)))


def _opened_again(state: RoundState) -> Result:
    """Reopen an ended run. Its unfinished round is redrawn, because its clients were cancelled."""
    state = replace(state, ending=None, failed_by="")
    if not state.goal:
        return go_on(state)
    restart = RestartRound(state.round, "the run had ended in it", states=False, state_epoch=state.state_epoch)
    state, effects = go_on(redraw(state))
    return state, (restart, *effects)
