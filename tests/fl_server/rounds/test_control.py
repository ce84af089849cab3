"""Operators' requests in each phase."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_server.rounds.effects import Announce, Cancel, EndRun, OpenAttempt, QuorumMissed, RestartRound
from fl_server.rounds.events import (
    EndRequested,
    EndStatus,
    Evaluated,
    Extended,
    ModelCommitted,
    PauseRequested,
    ResumeRequested,
    RosterChanged,
)
from fl_server.rounds.machine import advance
from fl_server.rounds.state import AFTER_MASKS, BEFORE_MASKS, Phase, UnexpectedEvent
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
def test_a_resume_undoes_a_pause(phase: Phase) -> None:
    """In every phase a pause sets only its flag, and a resume clears it."""
    state = SAMPLES[phase]
    paused, commands = advance(state, PauseRequested())
    assert (paused, commands) == (replace(state, paused=True), ())
    assert advance(paused, ResumeRequested())[0] == state


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED], ids=lambda phase: phase.value)
def test_an_extension_sets_the_number_of_rounds(phase: Phase) -> None:
    """In every open phase the run gets the requested number of rounds, without a command."""
    sample = SAMPLES[phase]
    assert advance(sample, Extended(9)) == (replace(sample, rounds=9, judged_from=sample.round), ())


def test_a_run_that_is_extended_in_its_last_evaluation_continues() -> None:
    """The extension is in time: the evaluation leads to the next round."""
    assert play(SAMPLES[Phase.EVALUATING], Extended(2), Evaluated())[0].phase is Phase.COLLECTING


def test_an_extended_run_draws_what_a_longer_run_draws() -> None:
    """A run of one round that is extended to two opens the round that a run of two rounds opens."""
    events = (*arrive("a"), *COMMIT)
    extended = play(collecting("a", rounds=1), *events, Evaluated(), Extended(2))[1][-1]
    assert extended == play(collecting("a", rounds=2), *events)[1][-1]


def test_a_run_that_ended_during_a_round_redraws_it() -> None:
    """Its clients were cancelled, so the round is redrawn, as an attempt that the ledger does not have yet."""
    ended, commands = play(collecting("ab", rounds=9), *arrive("a"), EndRequested("completed", "time is up"))
    assert commands == [Cancel(("b",), 0), EndRun("completed", "time is up")]
    assert ended.outstanding == frozenset()
    state, commands = play(ended, Extended(9))
    restart = RestartRound(0, "the run had ended in it", states=False)
    assert (state.admitted, commands) == ((), [restart, OpenAttempt(0, 0, 1, ("a", "b"))])


def test_a_failed_run_continues_from_its_last_model() -> None:
    """The round in which it failed is redrawn, after its rows are removed from the ledger."""
    failed = play(collecting("ab", rounds=9), *arrive("ab"), EndRequested("failed", "diverged"))[0]
    state, commands = play(failed, ResumeRequested())
    assert (state.phase, state.round, state.ending) == (Phase.COLLECTING, 0, None)
    restart = RestartRound(0, "the run had ended in it", states=False)
    assert commands == [restart, OpenAttempt(0, 0, 1, ("a", "b"))]


@pytest.mark.parametrize("status", ["stopped", "completed"])
def test_only_a_failed_run_can_be_resumed_after_its_end(status: EndStatus) -> None:
    """A stopped run stays stopped, and a completed one needs more rounds."""
    ended = play(collecting(), EndRequested(status, "why"))[0]
    with pytest.raises(UnexpectedEvent, match="only a failed run"):
        advance(ended, ResumeRequested())


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_only_a_completed_run_can_be_extended(status: EndStatus) -> None:
    """A stopped or failed run stays as it is."""
    ended = play(collecting(), EndRequested(status, "why"))[0]
    with pytest.raises(UnexpectedEvent, match="only a completed run"):
        advance(ended, Extended(9))


@pytest.mark.parametrize("phase", [Phase.STEPPING, Phase.COMMITTING], ids=lambda phase: phase.value)
def test_a_stop_waits_for_the_commit_under_way(phase: Phase) -> None:
    """Collected updates are not lost: the round is committed, then the run ends as requested, without a wait.

    Its evaluation goes on after the end.
    """
    state = replace(SAMPLES[phase], rounds=9)
    state, commands = play(state, STOP, *COMMIT[phase is Phase.COMMITTING :])
    assert commands[-2:] == [Announce(0, evaluate=True), EndRun("stopped", "stopped by an operator")]


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.ENDED], ids=lambda phase: phase.value)
def test_an_error_ends_the_run_at_once(phase: Phase) -> None:
    """A failed run continues in no phase, and only clients that still work are cancelled.

    A commit under way may be durable already: only its own failure ends the run before it.
    """
    state, commands = advance(SAMPLES[phase], EndRequested("failed", "disk full", broken=phase is Phase.COMMITTING))
    working = {Phase.COLLECTING: "b", **dict.fromkeys(BEFORE_MASKS, "ab"), **dict.fromkeys(AFTER_MASKS, "b")}
    cancelled = (Cancel(tuple(working[phase]), 0),) if phase in working else ()
    assert (state.phase, commands) == (Phase.ENDED, (*cancelled, EndRun("failed", "disk full")))


def test_a_failure_waits_for_the_commit_under_way() -> None:
    """Its checkpoint may be durable already: the round is committed, and then the run fails."""
    state, commands = advance(SAMPLES[Phase.COMMITTING], EndRequested("failed", "no held-out data"))
    assert (state.phase, commands) == (Phase.COMMITTING, ())
    state, commands = advance(replace(state, rounds=9), ModelCommitted())
    assert (state.round, commands[-1]) == (1, EndRun("failed", "no held-out data"))
