"""The draw of a round, and its conditions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_server.rounds.effects import AwaitClients, OpenAttempt, RetryLater
from fl_server.rounds.events import ResumeRequested, RosterChanged
from fl_server.rounds.machine import advance
from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import Phase, RoundState
from tests.fl_server.round_play import ALL, arrive, collecting, leave, play


def test_nothing_is_drawn_before_the_roster_is_settled() -> None:
    """With clients present, the first draw still waits until the roster is complete."""
    start = RoundState(RoundPolicy(seed=7), rounds=1)
    state, commands = play(start, RosterChanged(ALL, settled=False), ResumeRequested())
    assert (state.phase, commands) == (Phase.SELECTING, [])
    assert advance(state, RosterChanged(ALL, settled=True))[0].phase is Phase.COLLECTING


def test_no_replacement_is_drawn_before_the_roster_is_settled() -> None:
    """A restored round draws no replacement from a partial roster, and draws once the roster is complete."""
    restored = replace(collecting(quorum=3), settled=False, eligible=("a", "d"))
    state, commands = play(restored, *arrive("ab"), *leave("c"))
    assert (state.phase, commands[1:]) == (Phase.SELECTING, [AwaitClients(1, 0), RetryLater()])
    assert advance(state, RosterChanged(ALL, settled=False))[1] == ()
    opened = advance(state, RosterChanged(("a", "b", "e"), settled=True))[1]
    assert opened == (OpenAttempt(round=0, exchange=0, attempt=1, cohort=("e",)),)


def test_a_first_draw_waits_for_min_clients() -> None:
    """Below min_clients the run shows how many are missing; with enough it draws."""
    state = collecting("ab", min_clients=3, clients_per_round=2)
    assert advance(state, ResumeRequested()) == (state, (AwaitClients(needed=3, present=2),))
    assert len(advance(state, RosterChanged(("a", "b", "c"), settled=True))[0].drawn) == 2


def test_a_small_roster_gives_a_small_goal() -> None:
    """With fewer clients than the cohort size, all are drawn, and the quorum is at most their number."""
    state = collecting("ab", clients_per_round=5, quorum=4)
    assert (state.goal, state.quorum, state.drawn) == (2, 2, frozenset("ab"))


def test_bernoulli_draws_a_goal_of_its_own_size() -> None:
    """The goal of a Bernoulli round is the size of its cohort, also with an over-selection factor."""
    state = collecting("abcdefgh", sampling="bernoulli", rate=0.5, close="goal")
    assert 0 < state.goal == len(state.drawn) < 8


@pytest.mark.parametrize(("wanted", "factor", "drawn"), [(10, 1.3, 13), (50, 1.1, 55), (4, 1.3, 6), (3, 1.0, 3)])
def test_over_selection_rounds_up_once(wanted: int, factor: float, drawn: int) -> None:
    """ceil(wanted * factor) clients are drawn: 4 * 1.3 = 5.2 -> 6, and 50 * 1.1 is 55, although its float is larger."""
    many = "".join(map(chr, range(256, 320)))
    state = collecting(many, clients_per_round=wanted, close="goal", over_selection=factor)
    assert (state.goal, len(state.drawn)) == (wanted, drawn)
