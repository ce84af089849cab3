"""The fewest updates with which a round closes: half of its goal by default, and never fewer than min_accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_server.rounds import events as ev
from fl_server.rounds.machine import advance
from fl_server.rounds.sampling import Draw, RoundPolicy, draw_bernoulli
from fl_server.rounds.state import Phase, RoundState
from fl_server.run_settings.sections import RoundSection
from tests.fl_server.harness import run_config

FIVE = "abcde"


def after(policy: RoundPolicy, delivered: int) -> RoundState:
    """A round of five clients in which this many deliver and the others fail."""
    state, _ = advance(RoundState(policy, rounds=3), ev.RosterChanged(tuple(FIVE), settled=True))
    assert len(state.drawn) == 5
    for client in FIVE[:delivered]:
        state, _ = advance(state, ev.UpdateAdmitted(((client, client.encode()),)))
    for client in FIVE[delivered:]:
        if state.works(client):
            state, _ = advance(state, ev.ClientDroppedOut(client))
    return state


@pytest.mark.parametrize(
    ("round_", "fewest"),
    [
        ({"clients_per_round": 5}, 3),
        ({"sampling": "bernoulli", "rate": 1.0}, 3),
        ({"sampling": "bernoulli", "rate": 1.0, "quorum": 1}, 1),
        ({"clients_per_round": 5, "min_accepted": 4}, 4),
        ({"sampling": "bernoulli", "rate": 1.0, "min_accepted": 4}, 4),
        ({"clients_per_round": 5, "close": "goal", "over_selection": 1.0, "min_accepted": 5}, 5),
    ],
)
def test_a_round_with_failures_closes_with_the_fewest(round_: dict[str, object], fewest: int) -> None:
    """One update less, and it stays open for the next attempt."""
    policy = run_config("r", round=round_).policy()
    assert after(policy, fewest).phase is Phase.STEPPING
    assert after(policy, fewest - 1).phase is Phase.SELECTING


def test_a_bernoulli_cohort_is_as_large_as_the_floor() -> None:
    """A smaller one is drawn again, as an empty one is; at a tiny rate the cohort has just so many clients."""
    sizes = {len(draw_bernoulli(FIVE, 0.3, Draw(1, round_, 0), 3)) for round_ in range(50)}
    assert {3} <= sizes <= {3, 4, 5}
    assert len(draw_bernoulli(FIVE, 1e-9, Draw(1, 0, 0), 3)) == 3
    assert draw_bernoulli(FIVE, 0.3, Draw(1, 0, 0)) == draw_bernoulli(FIVE, 0.3, Draw(1, 0, 0), 1)


def test_the_next_exchange_keeps_the_floor() -> None:
    """Its cohort is the accepted list of the one before."""
    policy = replace(RoundPolicy(seed=0, sampling="bernoulli", rate=1.0, quorum=0), exchanges=2, min_accepted=3)
    state = after(policy, 4)
    assert state.phase is Phase.REDUCING
    state, _ = advance(state, ev.ExchangeReduced())
    assert (state.goal, state.quorum) == (4, 3)


def test_the_section_names_the_fewest() -> None:
    """Reducers that need a number of updates are checked against it."""
    assert [RoundSection(clients_per_round=count).fewest for count in (1, 2, 3, 5)] == [1, 1, 2, 3]
    assert RoundSection(clients_per_round=5, min_accepted=5).fewest == 5
