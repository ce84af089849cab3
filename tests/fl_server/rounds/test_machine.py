"""The round state machine's table: every (phase, event) pair."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from fl_server.rounds.events import (
    ClientDroppedOut,
    ClientReleased,
    ClientRestarted,
    ClientReturned,
    CulpritsFound,
    DeadlinePassed,
    EndRequested,
    Evaluated,
    Event,
    ExchangeReduced,
    Extended,
    GraphMade,
    ModelCommitted,
    ModelDiverged,
    PauseRequested,
    ResumeRequested,
    RetryDue,
    RosterChanged,
    RoundRestored,
    RoundSpoiled,
    StageAnswered,
    StateLost,
    StatesLost,
    StepComputed,
    TimeUsed,
    UpdateAdmitted,
    UpdateRefused,
    WorkFailed,
)
from fl_server.rounds.machine import RULES, advance
from fl_server.rounds.state import STAGES, Phase, UnexpectedEvent, replace
from tests.fl_server.round_play import SAMPLES, STOP, full_graph

EVENTS: tuple[Event, ...] = (
    RosterChanged(("a", "b", "c", "d"), settled=True), UpdateAdmitted((("b", b"b"),)), ClientDroppedOut("b"),
    ClientReturned("c"), ClientRestarted("b"), DeadlinePassed(), RoundRestored(), RetryDue(), ExchangeReduced(),
    StepComputed(), ModelCommitted(), Evaluated(), StatesLost("a: its disk is new"), PauseRequested(),
    ResumeRequested(), Extended(9), STOP, CulpritsFound((("a", "too long"),)), UpdateRefused("b", "norm", "too long"),
    WorkFailed("b", "no memory"), StateLost("b", "its disk is new"), ClientReleased("b"), ModelDiverged("NaN"),
    TimeUsed(9.0), StageAnswered("b"), full_graph("abc"), RoundSpoiled("its sum is too long"),
)  # fmt: skip
NEXT = (
    {
        (Phase.SELECTING, RosterChanged): Phase.COLLECTING,
        (Phase.SELECTING, ClientReturned): Phase.COLLECTING,
        (Phase.SELECTING, RetryDue): Phase.COLLECTING,
        (Phase.SELECTING, UpdateAdmitted): Phase.STEPPING,
        (Phase.SELECTING, EndRequested): Phase.ENDED,
        (Phase.SELECTING, StatesLost): Phase.COLLECTING,
        (Phase.SELECTING, UpdateRefused): Phase.SELECTING,
        (Phase.SELECTING, RoundRestored): Phase.SELECTING,
        (Phase.EVALUATING, RoundRestored): Phase.EVALUATING,
        (Phase.COLLECTING, UpdateRefused): Phase.SELECTING,
        (Phase.COLLECTING, WorkFailed): Phase.SELECTING,
        (Phase.COLLECTING, StateLost): Phase.COLLECTING,
        (Phase.COLLECTING, ClientRestarted): Phase.COLLECTING,
        (Phase.REDUCING, ModelDiverged): Phase.ENDED,
        (Phase.STEPPING, ModelDiverged): Phase.ENDED,
        (Phase.COLLECTING, UpdateAdmitted): Phase.STEPPING,
        (Phase.COLLECTING, ClientDroppedOut): Phase.SELECTING,
        (Phase.COLLECTING, ClientReturned): Phase.COLLECTING,
        (Phase.COLLECTING, DeadlinePassed): Phase.COLLECTING,
        (Phase.COLLECTING, RoundRestored): Phase.COLLECTING,
        (Phase.COLLECTING, EndRequested): Phase.ENDED,
        (Phase.REDUCING, ExchangeReduced): Phase.COLLECTING,
        (Phase.REDUCING, EndRequested): Phase.ENDED,
        (Phase.REDUCING, CulpritsFound): Phase.REDUCING,
        (Phase.STEPPING, CulpritsFound): Phase.SELECTING,
        (Phase.STEPPING, StepComputed): Phase.COMMITTING,
        (Phase.STEPPING, EndRequested): Phase.STEPPING,
        (Phase.COMMITTING, ModelCommitted): Phase.EVALUATING,
        (Phase.COMMITTING, EndRequested): Phase.COMMITTING,
        (Phase.EVALUATING, Evaluated): Phase.ENDED,
        (Phase.EVALUATING, EndRequested): Phase.ENDED,
        (Phase.ENDED, Extended): Phase.COLLECTING,
        (Phase.ENDED, RosterChanged): Phase.ENDED,
    }
    | {
        (phase, event): phase
        for phase in Phase
        for event in (
            RosterChanged,
            StatesLost,
            PauseRequested,
            ResumeRequested,
            Extended,
            Evaluated,
            TimeUsed,
            ClientReleased,
        )
        if phase is not Phase.ENDED
        and (phase, event)
        not in {
            (Phase.SELECTING, RosterChanged),
            (Phase.SELECTING, StatesLost),
            (Phase.EVALUATING, Evaluated),
        }
    }
    | {(Phase.ENDED, StatesLost): Phase.ENDED}
    | {
        (phase, event): phase if event in {ClientReturned, ClientRestarted, RoundRestored} else Phase.AGREEING
        for phase in STAGES
        for event in (
            ClientDroppedOut,
            WorkFailed,
            StateLost,
            ClientReturned,
            ClientRestarted,
            DeadlinePassed,
            RoundRestored,
            RoundSpoiled,
            StatesLost,
        )
    }
    | {(phase, StateLost): phase for phase in STAGES}
    | {(phase, EndRequested): Phase.ENDED for phase in STAGES}
    | {
        (Phase.AGREEING, StageAnswered): Phase.SHARING,
        (Phase.TOSSING, StageAnswered): Phase.AGREEING,
        (Phase.SHARING, StageAnswered): Phase.COLLECTING,
        (Phase.SIGNING, StageAnswered): Phase.OPENING,
        (Phase.OPENING, StageAnswered): Phase.STEPPING,
        (Phase.SHARING, GraphMade): Phase.SHARING,
        (Phase.COLLECTING, RoundSpoiled): Phase.COLLECTING,
        (Phase.STEPPING, RoundSpoiled): Phase.COLLECTING,
    }
)
"""The next phase for each sample and event; every other pair is refused."""
PAIRS = [pytest.param(phase, event, id=f"{phase.value}-{type(event).__name__}") for phase in Phase for event in EVENTS]


def test_the_samples_are_complete() -> None:
    """There is a sample in each phase, and one of each event."""
    assert {phase: state.phase for phase, state in SAMPLES.items()} == {phase: phase for phase in Phase}
    assert {type(event) for event in EVENTS} == set(get_args(Event))


@pytest.mark.parametrize(("phase", "event"), PAIRS)
def test_every_pair_of_phase_and_event(phase: Phase, event: Event) -> None:
    """A legal event leads to the expected phase; any other raises with its name and the phase, and changes nothing."""
    before, same = SAMPLES[phase], replace(SAMPLES[phase])
    if (phase, type(event)) in NEXT:
        assert advance(before, event)[0].phase is NEXT[phase, type(event)]
    else:
        with pytest.raises(UnexpectedEvent, match=f"{type(event).__name__} in phase {phase.value}"):
            advance(before, event)
    assert before == same


def test_the_table_has_no_other_pair() -> None:
    """RULES has exactly the legal pairs; the sample of an ended run has not failed, so it cannot be resumed."""
    assert set(RULES) == {*NEXT, (Phase.ENDED, ResumeRequested)}


@pytest.mark.parametrize(
    ("phase", "event", "why"),
    [
        (Phase.COLLECTING, UpdateAdmitted((("x", b"x"),)), "x is not of this round's cohort"),
        (Phase.COLLECTING, UpdateAdmitted((("a", b"2"),)), "a was admitted before"),
        (Phase.COLLECTING, UpdateAdmitted((("b", b"2"), ("x", b"x"))), "x is not of this round's cohort"),
        (Phase.COLLECTING, UpdateAdmitted((("b", b"2"), ("b", b"2"))), "b was admitted before"),
        (Phase.COLLECTING, ClientDroppedOut("a"), "a is not outstanding"),
        (Phase.COLLECTING, ClientDroppedOut("c"), "c is not outstanding"),
        (Phase.COLLECTING, ClientReturned("b"), "b is not out"),
        (Phase.SELECTING, ClientReturned("a"), "a is not out"),
        (Phase.EVALUATING, Extended(1), "expected more rounds than are done, 1"),
        (Phase.ENDED, Extended(1), "expected more rounds than are done, 1"),
    ],
)
def test_an_event_that_does_not_fit_the_state_is_refused(phase: Phase, event: Event, why: str) -> None:
    """The error of an event of a legal kind with wrong contents names the fault."""
    with pytest.raises(UnexpectedEvent, match=why):
        advance(SAMPLES[phase], event)


@pytest.mark.parametrize(
    "fields", [{}, {"round": 3, "admitted": (("a", b"1"),)}, {"phase": Phase.COLLECTING, "goal": 2}]
)
def test_a_state_is_replaced_as_dataclasses_do_it(fields: dict[str, Any]) -> None:
    """The core's own function makes the same value, also where the class converts a field, and changes no other."""
    state = SAMPLES[Phase.COLLECTING]
    made = replace(state, **fields)
    assert made == dataclasses.replace(state, **fields)
    assert type(made.admitted) is type(state.admitted)
    assert state == SAMPLES[Phase.COLLECTING]
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.round = 7  # type: ignore[misc]  # it may not be set
