"""The state that is restored from a ledger in the middle of a round."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from fl_server.rounds.restoring import restored_round
from fl_server.rounds.sampling import RoundPolicy
from fl_server.rounds.state import Phase, RoundState
from fl_server.run import restore_round
from fl_server.run.restore_round import read_round
from fl_server.store.database.store import Store, open_sqlite
from tests.fl_server.store.records import a_run, an_attempt, an_update, why

A, B = b"\1" * 32, b"\2" * 32


@pytest.fixture
def store() -> Iterator[Store]:
    """A ledger with the run r1."""
    store = open_sqlite(":memory:")
    store.create_run(a_run(), why())
    yield store
    store.close()


def initial_state(**changes: Any) -> RoundState:
    """The state at the start of round 0 of two clients; policy fields by their names."""
    policy = {"seed": 1, "clients_per_round": 2, "quorum": 1, **changes}
    return RoundState(RoundPolicy(**policy), rounds=5)


def restored(store: Store, state: RoundState | None = None, torn: Collection[str] = ()) -> RoundState:
    """The restored round; the updates of `torn` clients are damaged."""
    state = state or initial_state()
    with mock.patch.object(restore_round, "_is_whole", lambda _, update: update.client_id not in torn):
        return restored_round(state, read_round(store, "r1", state.round, mock.Mock()))


def test_nothing_was_drawn(store: Store) -> None:
    """The round starts without a draw."""
    state = replace(initial_state(), paused=True)
    assert restored(store, state) is state


def test_a_cohort_was_drawn(store: Store) -> None:
    """The round collects from the drawn clients."""
    store.open_attempt(an_attempt(cohort=("a", "b")))
    state = restored(store)
    assert (state.phase, state.goal, set(state.drawn), state.attempt) == (Phase.COLLECTING, 2, {"a", "b"}, 0)
    assert (state.admitted, set(state.outstanding)) == ((), {"a", "b"})


def test_updates_were_admitted(store: Store) -> None:
    """In the order of arrival, without the refused one."""
    store.open_attempt(an_attempt(cohort=("a", "b", "c")))
    store.record_update(an_update("a", digest=A, received_at=2.0))
    store.record_update(an_update("b", digest=B, received_at=1.0))
    store.record_update(an_update("c", admitted=False))
    assert restored(store).admitted == (("b", B), ("a", A))


def test_replacements_were_drawn(store: Store) -> None:
    """All drawn clients may deliver; the goal is that of the first attempt."""
    store.open_attempt(an_attempt(0, cohort=("a", "b")))
    store.open_attempt(an_attempt(1, cohort=("c",)))
    store.open_attempt(an_attempt(2, cohort=()))
    state = restored(store)
    assert (state.attempt, state.goal, set(state.drawn)) == (2, 2, {"a", "b", "c"})


@pytest.mark.parametrize(
    ("policy", "goal"),
    [({"close": "goal"}, 2), ({"sampling": "bernoulli", "rate": 0.5}, 3), ({"clients_per_round": 9}, 3)],
)
def test_the_goal_follows_from_the_draw(store: Store, policy: dict[str, Any], goal: int) -> None:
    """Of three drawn: two with over-selection, all with Bernoulli sampling or too few clients."""
    store.open_attempt(an_attempt(cohort=("a", "b", "c")))
    assert restored(store, initial_state(**policy)).goal == goal


def test_the_list_was_fixed(store: Store) -> None:
    """The exchange has the accepted updates, in their order, and no others: a later update does not join."""
    store.open_attempt(an_attempt(cohort=("a", "b", "c")))
    for client, digest, at in (("b", B, 1.0), ("a", A, 2.0), ("c", A, 3.0)):
        store.record_update(an_update(client, digest=digest, received_at=at))
    store.fix_accepted("r1", 0, 0, [("a", A), ("b", B)])
    state = restored(store)
    assert (state.goal, set(state.drawn), set(state.admitted)) == (2, {"a", "b"}, {("a", A), ("b", B)})
    assert state.fixed == (("a", A), ("b", B))


def test_a_fixed_list_with_a_torn_update_is_incomplete(store: Store) -> None:
    """Only the list can close the exchange, and the client of the torn update must send it again."""
    store.open_attempt(an_attempt(cohort=("a", "b")))
    store.record_update(an_update("a", digest=A))
    store.record_update(an_update("b", digest=B))
    store.fix_accepted("r1", 0, 0, [("a", A), ("b", B)])
    state = restored(store, torn={"a"})
    assert (state.fixed, state.admitted, set(state.outstanding)) == ((("a", A), ("b", B)), (("b", B),), {"a"})


def test_a_torn_update_is_dropped(store: Store) -> None:
    """It is removed from the ledger, with a row in the history, and may be sent again; a refusal remains."""
    store.open_attempt(an_attempt(cohort=("a", "b", "c")))
    store.record_update(an_update("a", digest=A))
    store.record_update(an_update("b", digest=B))
    store.record_update(an_update("c", admitted=False))
    state = restored(store, torn={"a", "c"})
    assert (state.admitted, set(state.outstanding)) == ((("b", B),), {"a", "c"})
    assert [update.client_id for update in store.updates("r1", 0, 0)] == ["b", "c"]
    assert [entry.event for entry in store.history("r1")] == ["changed", "update_dropped"]


def test_rows_of_another_round_are_ignored(store: Store) -> None:
    """The ledger has round 0, and round 1 is open: it has no draw yet."""
    store.open_attempt(an_attempt(cohort=("a", "b")))
    state = replace(initial_state(), round=1)
    assert restored(store, state) is state


def test_a_later_exchange_continues_with_its_own_cohort(store: Store) -> None:
    """Its goal is the whole cohort: its clients cannot be replaced."""
    store.open_attempt(an_attempt(exchange=0, cohort=("a", "b", "c")))
    store.open_attempt(an_attempt(exchange=1, cohort=("a", "b", "c")))
    store.record_update(an_update("a", digest=A))
    store.record_update(replace(an_update("b", digest=B), exchange=1))
    state = restored(store, initial_state(exchanges=2))
    assert (state.exchange, state.goal, state.admitted) == (1, 3, (("b", B),))
