"""A ledger that was left in the middle of a round, and the state that comes back from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_server.recovery import recover_round
from fl_server.round_state import Phase, RoundPolicy, RoundState
from fl_server.store.sql import open_sqlite
from tests.fl_server.store.records import a_run, an_attempt, an_update, why

A, B = b"\1" * 32, b"\2" * 32


@pytest.fixture
def store():
    """A ledger with the run r1."""
    store = open_sqlite(":memory:")
    store.create_run(a_run(), why())
    yield store
    store.close()


def fresh(**changes):
    """The state at the start of round 0 of two clients; policy fields by their names."""
    policy = {"seed": 1, "clients_per_round": 2, "quorum": 1, **changes}
    return RoundState(RoundPolicy(**policy), rounds=5)


def recovered(store, state=None, torn=()):
    """The round as it comes back; updates of `torn` clients are not whole."""
    return recover_round(store, "r1", state or fresh(), lambda update: update.client_id not in torn)


def test_nothing_was_drawn(store):
    """The round begins as if nothing had been."""
    state = replace(fresh(), paused=True)
    assert recovered(store, state) is state


def test_a_cohort_was_drawn(store):
    """Collecting, from those who were told."""
    store.open_attempt(an_attempt(cohort=("a", "b")))
    state = recovered(store)
    assert (state.phase, state.goal, state.drawn, state.attempt) == (Phase.COLLECTING, 2, {"a", "b"}, 0)
    assert (state.admitted, state.outstanding) == ((), {"a", "b"})


def test_updates_were_admitted(store):
    """In the order in which they came; a refused one is not among them."""
    store.open_attempt(an_attempt(cohort=("a", "b", "c")))
    store.record_update(an_update("a", digest=A, received_at=2.0))
    store.record_update(an_update("b", digest=B, received_at=1.0))
    store.record_update(an_update("c", admitted=False))
    assert recovered(store).admitted == (("b", B), ("a", A))


def test_replacements_were_drawn(store):
    """Everybody who was told may deliver; the goal is the first attempt's."""
    store.open_attempt(an_attempt(0, cohort=("a", "b")))
    store.open_attempt(an_attempt(1, cohort=("c",)))
    store.open_attempt(an_attempt(2, cohort=()))
    state = recovered(store)
    assert (state.attempt, state.goal, state.drawn) == (2, 2, {"a", "b", "c"})


@pytest.mark.parametrize(
    ("policy", "goal"),
    [({"close": "goal"}, 2), ({"sampling": "bernoulli", "rate": 0.5}, 3), ({"clients_per_round": 9}, 3)],
)
def test_the_goal_is_what_the_draw_made_it(store, policy, goal):
    """Of three drawn: two with over-selection, all with Bernoulli sampling or too few clients."""
    store.open_attempt(an_attempt(cohort=("a", "b", "c")))
    assert recovered(store, fresh(**policy)).goal == goal


def test_the_list_was_fixed(store):
    """The exchange is the accepted updates, in their order, and no others: also one that came later is none of them."""
    store.open_attempt(an_attempt(cohort=("a", "b", "c")))
    for client, digest, at in (("b", B, 1.0), ("a", A, 2.0), ("c", A, 3.0)):
        store.record_update(an_update(client, digest=digest, received_at=at))
    store.fix_accepted("r1", 0, 0, [("a", A), ("b", B)])
    state = recovered(store)
    assert (state.goal, state.drawn, set(state.admitted)) == (2, {"a", "b"}, {("a", A), ("b", B)})
    assert state.fixed == (("a", A), ("b", B))


def test_a_fixed_list_with_a_torn_update_is_not_whole(store):
    """Nothing but the list can close the exchange, and the client of the torn update is asked for the same again."""
    store.open_attempt(an_attempt(cohort=("a", "b")))
    store.record_update(an_update("a", digest=A))
    store.record_update(an_update("b", digest=B))
    store.fix_accepted("r1", 0, 0, [("a", A), ("b", B)])
    state = recovered(store, torn={"a"})
    assert (state.fixed, state.admitted, state.outstanding) == ((("a", A), ("b", B)), (("b", B),), {"a"})


def test_a_torn_update_is_dropped(store):
    """It leaves the ledger, with a line in the history, and its client may send it again; a refusal stays."""
    store.open_attempt(an_attempt(cohort=("a", "b", "c")))
    store.record_update(an_update("a", digest=A))
    store.record_update(an_update("b", digest=B))
    store.record_update(an_update("c", admitted=False))
    state = recovered(store, torn={"a", "c"})
    assert (state.admitted, state.outstanding) == ((("b", B),), {"a", "c"})
    assert [update.client_id for update in store.updates("r1", 0, 0)] == ["b", "c"]
    assert [entry.event for entry in store.history("r1")] == ["changed", "update_dropped"]


def test_another_round_is_not_looked_at(store):
    """The ledger has round 0, and round 1 is under way: nothing of it was drawn."""
    store.open_attempt(an_attempt(cohort=("a", "b")))
    state = replace(fresh(), round=1)
    assert recovered(store, state) is state


def test_a_later_exchange_goes_on_with_its_own_cohort(store):
    """Its goal is all of it: nobody can replace them."""
    store.open_attempt(an_attempt(exchange=0, cohort=("a", "b", "c")))
    store.open_attempt(an_attempt(exchange=1, cohort=("a", "b", "c")))
    store.record_update(an_update("a", digest=A))
    store.record_update(replace(an_update("b", digest=B), exchange=1))
    state = recovered(store, fresh(exchanges=2))
    assert (state.exchange, state.goal, state.admitted) == (1, 3, (("b", B),))
