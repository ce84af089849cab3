"""What operators may do in each phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fl_server.events import (
    Announce,
    Cancel,
    End,
    EndRequested,
    Evaluated,
    Extended,
    OpenAttempt,
    PauseRequested,
    QuorumMissed,
    RestartRound,
    ResumeRequested,
    RosterChanged,
)
from fl_server.round_rule import UnexpectedEvent
from fl_server.round_state import Phase
from fl_server.rounds import advance
from tests.fl_server.round_play import ALL, COMMIT, SAMPLES, STOP, arrive, collecting, leave, play


def test_a_pause_lets_the_round_finish_and_holds_the_next() -> None:
    """A paused run fills, replaces and commits its open round, and draws the next one when resumed."""
    paused = play(collecting("ab", quorum=2), PauseRequested(), *leave("a"), RosterChanged(("b", "c"), settled=True))[0]
    state, commands = play(paused, *arrive("b"))
    assert commands == [QuorumMissed(0, 0, 0, 1, 2), OpenAttempt(0, 0, 1, ("c",))]
    state, commands = play(state, *arrive("c"), *COMMIT, RosterChanged(ALL, settled=True))
    assert (state.phase, state.round, type(commands[-1])) == (Phase.SELECTING, 1, Announce)
    assert advance(state, ResumeRequested())[0].phase is Phase.COLLECTING


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED], ids=lambda phase: phase.value)
def test_pause_and_resume_leave_no_trace(phase: Phase) -> None:
    """In every phase a pause changes nothing but the word, and a resume takes it back."""
    state = SAMPLES[phase]
    paused, commands = advance(state, PauseRequested())
    assert (paused, commands) == (replace(state, paused=True), ())
    assert advance(paused, ResumeRequested())[0] == state


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED], ids=lambda phase: phase.value)
def test_an_extension_sets_the_number_of_rounds(phase: Phase) -> None:
    """In every open phase the run gets as many rounds as were asked for, and does nothing else."""
    assert advance(SAMPLES[phase], Extended(9)) == (replace(SAMPLES[phase], rounds=9), ())


def test_a_run_that_is_extended_in_its_last_evaluation_goes_on() -> None:
    """The extension came in time: the evaluation leads to the next round."""
    assert play(SAMPLES[Phase.EVALUATING], Extended(2), Evaluated())[0].phase is Phase.COLLECTING


def test_an_extended_run_draws_what_a_longer_run_draws() -> None:
    """A run of one round that is extended to two opens the round that a run of two rounds opens."""
    events = (*arrive("a"), *COMMIT)
    extended = play(collecting("a", rounds=1), *events, Evaluated(), Extended(2))[1][-1]
    assert extended == play(collecting("a", rounds=2), *events)[1][-1]


def test_a_run_that_ended_in_mid_round_reopens_it_anew() -> None:
    """Its clients were told to stop, so the round is drawn again, as an attempt that the ledger does not know yet."""
    ended, commands = play(collecting("ab", rounds=9), *arrive("a"), EndRequested("completed", "time is up"))
    assert commands == [Cancel(("b",), 0), End("completed", "time is up")]
    assert ended.outstanding == frozenset()
    state, commands = play(ended, Extended(9))
    forgets = RestartRound(0, "the run had ended in it", states=False)
    assert (state.admitted, commands) == ((), [forgets, OpenAttempt(0, 0, 1, ("a", "b"))])


def test_a_failed_run_goes_on_from_its_last_model() -> None:
    """The round in which it failed is drawn anew; what the ledger has of it is forgotten first."""
    failed = play(collecting("ab", rounds=9), *arrive("ab"), EndRequested("failed", "diverged"))[0]
    state, commands = play(failed, ResumeRequested())
    assert (state.phase, state.round, state.ending) == (Phase.COLLECTING, 0, None)
    forgets = RestartRound(0, "the run had ended in it", states=False)
    assert commands == [forgets, OpenAttempt(0, 0, 1, ("a", "b"))]


@pytest.mark.parametrize("status", ["stopped", "completed"])
def test_only_a_failed_run_goes_on_as_it_is(status: Any) -> None:
    """A run that was stopped stays so, and a completed one needs more rounds."""
    ended = play(collecting(), EndRequested(status, "why"))[0]
    with pytest.raises(UnexpectedEvent, match="only a failed run"):
        advance(ended, ResumeRequested())


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_only_a_completed_run_can_be_extended(status: Any) -> None:
    """A run that was stopped or failed stays so."""
    ended = play(collecting(), EndRequested(status, "why"))[0]
    with pytest.raises(UnexpectedEvent, match="only a completed run"):
        advance(ended, Extended(9))


@pytest.mark.parametrize("phase", [Phase.STEPPING, Phase.COMMITTING], ids=lambda phase: phase.value)
def test_a_stop_waits_for_the_commit_under_way(phase: Phase) -> None:
    """What was collected is not thrown away: the round is committed and evaluated, then the run ends as it was told."""
    state = replace(SAMPLES[phase], rounds=9)
    state, commands = play(state, STOP, *COMMIT[phase is Phase.COMMITTING :], Evaluated())
    assert (state.round, commands[-1]) == (1, End("stopped", "an operator said so"))


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED], ids=lambda phase: phase.value)
def test_an_error_ends_the_run_at_once(phase: Phase) -> None:
    """A run that failed does not go on in any phase, and only those who still work are told to stop."""
    state, commands = advance(SAMPLES[phase], EndRequested("failed", "disk full"))
    told = (Cancel(("b",), 0),) if phase is Phase.COLLECTING else ()
    assert (state.phase, commands) == (Phase.ENDED, (*told, End("failed", "disk full")))
