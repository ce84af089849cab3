"""Faults of several clients that are one fault of the run: which ones end it, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_server.rounds.by_client import Failed, Refused
from fl_server.rounds.effects import EndRun, RecordFailure, RestartRound, RetryLater, SendWork
from fl_server.rounds.events import (
    ClientRestarted,
    ClientReturned,
    CulpritsFound,
    Event,
    Fault,
    ModelDiverged,
    ResumeRequested,
    RetryDue,
    RosterChanged,
    RoundRestored,
    UpdateRefused,
    WorkFailed,
)
from fl_server.rounds.restoring import SavedRound, restored_round, without_absent
from fl_server.rounds.state import Phase, RoundState
from tests.fl_server.round_play import ALL, arrive, collecting, leave, play


def refused(clients: str, fault: Fault, why: str = "expected less, got more") -> list[Event]:
    """A refused update of each of these clients."""
    return [UpdateRefused(client, fault, why) for client in clients]


def not_finite(clients: str) -> list[Event]:
    """A failure of each of these clients with a NaN."""
    return [WorkFailed(client, "loss nan", not_finite=True) for client in clients]


@pytest.mark.parametrize(
    ("events", "failed_by"),
    [
        (not_finite("ab"), "not_finite"),
        ([*not_finite("a"), *refused("b", "not_finite")], "not_finite"),
        ([*arrive("a"), *not_finite("b")], ""),
        (refused("ab", "norm"), "norm"),
        ([*refused("a", "norm"), *not_finite("b")], "norm"),
        ([*refused("a", "norm"), *leave("b")], ""),
        (refused("ab", "layout"), "layout"),
        ([*refused("a", "layout"), *refused("b", "layout", "expected another, got more")], ""),
        (refused("ab", ""), ""),
    ],
    ids=["nan", "nan-two-ways", "one-counts", "norms", "mixed", "one-norm", "layouts", "two-layouts", "other"],
)
def test_a_fault_of_all_clients_ends_the_run(events: list[Event], failed_by: str) -> None:
    """Two clients are drawn and there is no other: what all of them have is the run's own fault."""
    state, effects = play(collecting("ab", quorum=2), *events)
    assert state.failed_by == failed_by
    assert (state.phase is Phase.ENDED) == bool(failed_by)
    assert any(isinstance(effect, EndRun) for effect in effects) == bool(failed_by)
    assert any(isinstance(effect, RetryLater) for effect in effects) == (not failed_by)


def test_values_that_are_not_finite_end_the_run_while_others_could_be_drawn() -> None:
    """As many clients as the round wants got them, and none delivered: nobody else is asked."""
    state, _ = play(collecting("ab"), RosterChanged(ALL, settled=True), *not_finite("ab"))
    assert state.ending is not None
    assert state.ending[1].startswith("2 clients got values that are not finite in round 0, and no client got others; ")


def test_one_client_fails_no_run_while_others_can_be_drawn() -> None:
    """Its replacement is drawn."""
    state, _ = play(collecting("a"), RosterChanged(("a", "b"), settled=True), *not_finite("a"))
    assert (state.phase, set(state.outstanding)) == (Phase.COLLECTING, {"b"})


def test_a_refused_client_is_not_drawn_again_for_the_round() -> None:
    """A client whose work failed is; one whose work would fail again is not. The next round draws all."""
    events = [*refused("a", ""), WorkFailed("b", "no memory"), WorkFailed("c", "no memory", repeats=True), RetryDue()]
    state, _ = play(collecting("abc"), *events)
    assert (state.phase, set(state.outstanding)) == (Phase.COLLECTING, {"b"})
    state, _ = play(state, *arrive("b"), RosterChanged(("a", "b", "c"), settled=True))
    assert set(state.candidates) == {"b"}


@pytest.mark.parametrize("admitted", ["", "c"])
def test_a_round_whose_other_clients_were_refused_is_redrawn(admitted: str) -> None:
    """After the wait all of them are drawn again, and the reason has the first refusal."""
    events = [*arrive(admitted), *refused("a", "", "expected 3 examples, got 4"), *refused("b", "", "torn")]
    state, effects = play(collecting(f"ab{admitted}", quorum=2), *events)
    assert (state.phase, type(effects[-1])) == (Phase.SELECTING, RetryLater)
    state, effects = play(state, RetryDue())
    why = "2 of its clients were refused, and no other is left; a: expected 3 examples, got 4"
    assert effects[0] == RestartRound(0, why, states=False)
    assert (set(state.outstanding), state.admitted) == (set(f"ab{admitted}"), ())


def test_a_round_with_refused_clients_waits_for_one_that_may_still_deliver() -> None:
    """It is not redrawn: the update that is here stays."""
    events = [*arrive("a"), *refused("b", ""), *leave("c"), RosterChanged(("a", "b"), settled=True), RetryDue()]
    state, _ = play(collecting("abc", quorum=2), *events)
    assert (state.phase, len(state.admitted)) == (Phase.SELECTING, 1)
    state, _ = play(state, RosterChanged(tuple("abc"), settled=True), ClientReturned("c"), *arrive("c"))
    assert state.phase is Phase.STEPPING


def test_a_client_whose_daemon_restarts_too_often_has_failed() -> None:
    """Its work is sent again until so many of its processes had it, also after a restart of the coordinator."""
    state, effects = play(collecting("ab", most_processes=2), ClientRestarted("a"))
    assert effects == [SendWork("a")]
    for before in (state, killed(state, restarts={"a": 1})):
        after, effects = play(before, ClientRestarted("a"))
        why = "the daemon restarted while it worked: 2 processes of it had the assignment, and none answered"
        assert (effects, set(after.out)) == ([RecordFailure("a", why)], {"a"})
        assert not after.may_return("a")


def test_a_client_that_may_not_be_drawn_is_not_asked_again() -> None:
    """It may not train, is in quarantine, or works for another run: so it is not eligible."""
    state, _ = play(collecting("ab"), *leave("a"), RosterChanged(("b",), settled=True))
    assert not state.may_return("a")
    assert play(state, RosterChanged(("a", "b"), settled=True))[0].may_return("a")


def test_a_client_that_failed_three_times_is_not_asked_when_it_returns() -> None:
    """It may still be drawn at a retry."""
    state = collecting("ab")
    for times in range(1, 4):
        state, _ = play(state, WorkFailed("a", "no memory"))
        assert state.may_return("a") == (times < 3)
        state, _ = play(state, *leave("b"), RetryDue())
        assert state.works("a")


def test_a_culprit_of_an_overflow_counts_as_not_finite() -> None:
    """Both updates made the sum overflow, one after the other: no finite update is left."""
    state, _ = play(collecting("ab", quorum=1), *arrive("ab"), CulpritsFound((("a", "too long"),)))
    assert state.phase is Phase.STEPPING
    state, _ = play(state, CulpritsFound((("b", "too long"),)))
    assert state.failed_by == "not_finite"


def test_a_model_that_is_not_finite_ends_the_run_and_can_be_resumed() -> None:
    """After the resumption nothing of the fault is left."""
    state, _ = play(collecting("ab"), *arrive("ab"), ModelDiverged("the model of round 0 is not finite"))
    assert (state.ending, state.failed_by) == (("failed", "the model of round 0 is not finite"), "not_finite")
    state, _ = play(state, ResumeRequested())
    assert (state.phase, state.ending, state.failed_by) == (Phase.COLLECTING, None, "")


def killed(state: RoundState, **saved: object) -> RoundState:
    """The state after a restart, from what the ledger has of the round; both clients are present."""
    fresh = RoundState(state.policy, state.rounds, eligible=state.eligible, settled=True)
    after = restored_round(fresh, SavedRound([(0, 0, tuple(sorted(state.drawn)))], **saved))  # type: ignore[arg-type]
    return without_absent(after, set(ALL))


@pytest.mark.parametrize("fault", ["not_finite", "norm", "layout"])
def test_a_kill_between_two_refusals_changes_no_decision(fault: Fault) -> None:
    """The second client is refused after the restart: the run fails for the same reason as without a kill."""
    first, second = refused("a", fault)[0], refused("b", fault)[0]
    expected, _ = play(collecting("ab", quorum=2), first, second)
    assert isinstance(first, UpdateRefused)
    restored = killed(collecting("ab", quorum=2), refused={"a": Refused(fault, first.why)})
    got, _ = play(restored, RoundRestored(), second)
    assert (got.ending, got.failed_by) == (expected.ending, expected.failed_by)
    assert got.failed_by == fault


def test_a_kill_between_the_last_fault_and_the_end_changes_nothing() -> None:
    """Both failures are in the ledger: the restart itself ends the run."""
    failed = {client: Failed("loss nan", not_finite=True) for client in "ab"}
    state, effects = play(killed(collecting("ab"), failed=failed), RoundRestored())
    assert state.failed_by == "not_finite"
    assert isinstance(effects[-1], EndRun)


def test_a_failure_before_a_refused_update_is_over_after_a_restart_too() -> None:
    """Also if the update was accepted first: the ledger keeps the failure, and the refusal is later."""
    state, _ = play(collecting("ab", quorum=1), WorkFailed("a", "no memory"), *arrive("b"))
    state, _ = play(state, CulpritsFound((("b", "too long"),)))
    saved = {"failed": {"a": Failed("no memory"), "b": Failed("no memory")}, "refused": dict(state.refused)}
    assert killed(state, **saved).failed == state.failed == {"a": Failed("no memory")}


def test_a_failed_client_that_is_not_drawn_again_stays_in_the_cohort() -> None:
    """Two failed, and one update is missing: the other may still deliver, as it may after a restart."""
    state, _ = play(collecting("abc", quorum=3), *arrive("c"), *[WorkFailed(client, "no memory") for client in "ab"])
    state, _ = play(replace(state, goal=2), RetryDue())
    assert (state.drawn, len(state.outstanding), len(state.out)) == (frozenset("abc"), 1, 1)
