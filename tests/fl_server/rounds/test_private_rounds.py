"""Rounds of client-level privacy: who takes part and when a round closes depends on no other client."""

from __future__ import annotations

from collections import Counter

import pytest

from fl_server.rounds import events as ev
from fl_server.rounds.effects import ComputeStep, Effect, EndRun, OpenAttempt
from fl_server.rounds.machine import advance
from fl_server.rounds.restoring import SavedRound, restored_round
from fl_server.rounds.sampling import Draw, RoundPolicy, draw_bernoulli
from fl_server.rounds.selecting import next_round
from fl_server.rounds.state import Phase, RoundState, replace
from tests.fl_server.round_play import arrive, leave, play

ALL = tuple("abcdefgh")


def policy(rate: float = 1.0, **more: object) -> RoundPolicy:
    """A private policy; with rate 1 every client is drawn."""
    return RoundPolicy(seed=7, sampling="bernoulli", rate=rate, private=True, min_accepted=0, quorum=0, **more)  # type: ignore[arg-type]


def drawn(rate: float = 1.0, clients: str = "abc", rounds: int = 3, **more: object) -> tuple[RoundState, list[Effect]]:
    """The state after the first draw, and the effects."""
    start = RoundState(policy(rate, **more), rounds)
    state, effects = advance(start, ev.RosterChanged(tuple(clients), settled=True))
    return state, list(effects)


@pytest.mark.parametrize("last", [ev.DeadlinePassed(), *leave("c")])
def test_a_round_closes_with_what_came(last: ev.Event) -> None:
    """One of three delivered, one is out: the deadline or the last drop-out closes the round; nobody is drawn anew."""
    state, _ = drawn()
    state, effects = play(state, *arrive("a"), *leave("b"), *([last] if isinstance(last, ev.DeadlinePassed) else []))
    if not isinstance(last, ev.DeadlinePassed):
        state, effects = play(state, last)
    assert state.phase is Phase.STEPPING
    assert [effect for effect in effects if isinstance(effect, ComputeStep)] == [ComputeStep((("a", b"a"),))]
    assert not [effect for effect in effects if isinstance(effect, OpenAttempt)]


def test_a_round_without_updates_makes_a_step() -> None:
    """All clients fail: the step has no update."""
    state, effects = play(drawn()[0], *leave("abc"))
    assert (state.phase, state.accepted) == (Phase.STEPPING, ())
    assert ComputeStep(()) in effects


def test_an_empty_draw_makes_a_step_after_it_is_written() -> None:
    """A tiny rate draws nobody. The draw is written, and charged, before the step; the next round follows."""
    state, effects = drawn(rate=1e-9)
    assert effects == [OpenAttempt(0, 0, 0, ()), ComputeStep(())]
    assert (state.phase, state.draws, state.goal) == (Phase.STEPPING, 1, 1)
    state, effects = play(state, ev.StepComputed(), ev.ModelCommitted())
    assert (state.round, state.draws) == (1, 2)
    assert OpenAttempt(1, 0, 0, ()) in effects


def test_every_client_is_drawn_by_itself() -> None:
    """A client is drawn in the same rounds whoever else is there, and about as often as the rate says."""
    rounds = range(400)
    alone = [draw_bernoulli("a", 0.3, Draw(5, round_, 0), 0) for round_ in rounds]
    among = [draw_bernoulli(ALL, 0.3, Draw(5, round_, 0), 0) for round_ in rounds]
    assert [bool(cohort) for cohort in alone] == ["a" in cohort for cohort in among]
    counts = Counter(client for cohort in among for client in cohort)
    assert all(80 <= counts[client] <= 160 for client in ALL)
    assert any(not cohort for cohort in draws_of_two(rounds))


def draws_of_two(rounds: range) -> list[tuple[str, ...]]:
    """Draws of two clients, some of which are empty."""
    return [draw_bernoulli("ab", 0.3, Draw(5, round_, 0), 0) for round_ in rounds]


def test_the_budget_ends_the_run_before_the_draw_that_exceeds_it() -> None:
    """Two draws are allowed; a round that was redrawn has used one."""
    state, _ = drawn(most_draws=2, rounds=9)
    state, effects = play(state, ev.StatesLost("a: its disk is new"))
    assert (state.draws, state.attempt) == (2, 1)
    state, effects = play(state, *arrive("abc"), ev.StepComputed(), ev.ModelCommitted())
    assert state.phase is Phase.ENDED
    ends = [effect for effect in effects if isinstance(effect, EndRun)]
    assert [(effect.status, effect.reason) for effect in ends] == [("completed", "its privacy budget allows 2 draws")]


@pytest.mark.parametrize("fixed", [None, ()])
def test_an_empty_round_goes_on_after_a_restart(fixed: tuple[tuple[str, bytes], ...] | None) -> None:
    """The ledger has an attempt without clients, and the step was under way or not: it is made, and no other draw."""
    fresh = next_round(RoundState(policy(1e-9), 3, round=-1, draws=1))
    state = restored_round(fresh, SavedRound([(0, 0, ())], fixed=fixed))
    state, effects = advance(replace(state, settled=True, eligible=ALL), ev.RoundRestored())
    assert (state.phase, effects, state.draws) == (Phase.STEPPING, (ComputeStep(()),), 1)


def test_the_list_that_was_fixed_before_a_restart_is_kept() -> None:
    """A step of one update was under way; another update whose bytes are here does not join it."""
    fresh = next_round(RoundState(policy(), 3, round=-1, draws=1))
    saved = SavedRound([(0, 0, ("a", "b"))], admitted=(("a", b"a"), ("b", b"b")), fixed=(("a", b"a"),))
    state, effects = advance(restored_round(fresh, saved), ev.RoundRestored())
    assert (state.phase, effects) == (Phase.STEPPING, (ComputeStep((("a", b"a"),)),))
