"""The lease in PostgreSQL: who may take it, and that a leader before can neither renew it nor write."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fl_server.store.database.lease import LeaseTerms
from fl_server.store.database.store import GONE_S, LeaseKeeper, LeaseWatch, Store, open_ledger
from fl_server.store.database.transactions import Home
from fl_server.store.errors import LedgerHeld, StoreError, StoreTakenOver
from tests.fl_server.store.records import a_run, why
from tests.postgres_server import PostgresServer

STORAGE = "file:///nowhere"


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    """URL of the ledger."""
    return postgres.new_ledger()


def opened(url: str, tmp_path: Path, name: str, seconds: float = 10.0, gone: int = 0) -> Store:
    """The ledger, opened by a coordinator with a directory of this name and an object store."""
    return open_ledger(url, tmp_path, home=Home(name, storage=STORAGE), terms=LeaseTerms(seconds, gone))


@pytest.fixture
def leader(url: str, tmp_path: Path) -> Iterator[Store]:
    """A coordinator that leads."""
    store = opened(url, tmp_path, "one")
    store.create_run(a_run(), why("created"))
    yield store
    store.close()


class Time:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_is_refused_while_it_lasts(url: str, leader: Store, tmp_path: Path) -> None:
    """The leader can write on."""
    with pytest.raises(LedgerHeld):
        opened(url, tmp_path, "two")
    leader.add_history(why("mine"))


def test_the_same_directory_takes_it_at_once(url: str, leader: Store, tmp_path: Path) -> None:
    """A restart need not wait: it has the lock of the directory."""
    with closing(opened(url, tmp_path, "one")) as again:
        assert again.claim.epoch == leader.claim.epoch + 1


def test_an_ended_lease_is_taken_and_the_leader_before_changes_nothing(url: str, tmp_path: Path) -> None:
    """Neither its ledger nor the renewal of its lease works any more, and its close does not end the new lease."""
    before = opened(url, tmp_path, "one", seconds=0.01)
    keeper = LeaseKeeper(url, before.claim.epoch, 10.0)
    with closing(opened(url, tmp_path, "two")) as after:
        with pytest.raises(StoreError):  # its connection was ended
            before.add_history(why("mine"))
        with pytest.raises(StoreTakenOver, match="another coordinator has opened the ledger"):
            before.add_history(why("mine"))
        with pytest.raises(StoreError):
            keeper.renew()
        with pytest.raises(StoreTakenOver, match="leads now"):
            keeper.renew()
        before.close()
        after.add_history(why("the other's"))
        with pytest.raises(LedgerHeld):
            opened(url, tmp_path, "three")
        assert [entry.event for entry in after.history()] == ["leader_changed", "the other's"]
    keeper.close()


def test_a_renewed_lease_lasts(url: str, tmp_path: Path) -> None:
    """Each renewal counts from its own time."""
    with closing(opened(url, tmp_path, "one", seconds=0.01)) as store:
        keeper = LeaseKeeper(url, store.claim.epoch, 10.0)
        keeper.renew()
        with pytest.raises(LedgerHeld):
            opened(url, tmp_path, "two")
        keeper.close()


def test_a_leader_that_closes_gives_the_lease_back(url: str, leader: Store, tmp_path: Path) -> None:
    """The standby leads without a wait."""
    watch = LeaseWatch(url, "two")
    assert not watch.is_free(watch.look())
    leader.close()
    assert watch.is_free(watch.look())
    opened(url, tmp_path, "two").close()
    watch.close()


def test_a_leader_that_hangs_in_a_transaction_is_ended(url: str, tmp_path: Path) -> None:
    """Its transaction holds the epoch. The takeover ends its connection, and nothing of the transaction stays."""
    before = opened(url, tmp_path, "one", seconds=0.01)
    after: list[Store] = []

    def hang() -> None:
        with before._transaction("hang") as db:
            db.exec_driver_sql("DELETE FROM identity WHERE false")
            after.append(opened(url, tmp_path, "two"))
            db.exec_driver_sql("DELETE FROM history")

    with pytest.raises(StoreError):
        hang()
    assert [entry.event for entry in after[0].history()] == ["leader_changed"]
    after[0].close()
    before.close()


def test_a_leader_without_connections_is_gone(url: str, leader: Store, tmp_path: Path) -> None:
    """Not at once, because a lost connection is replaced; and not if one came back meanwhile."""
    time = Time()
    watch = LeaseWatch(url, "two", time)
    assert not watch.is_free(watch.look())
    leader._engine.dispose()
    watch.look()
    time.now = GONE_S / 2
    assert not watch.is_free(watch.look())
    leader.runs()
    watch.look()
    time.now = 2 * GONE_S
    assert not watch.is_free(watch.look())
    leader._engine.dispose()
    watch.look()
    time.now = 4 * GONE_S
    leadership = watch.look()
    assert watch.is_free(leadership)
    assert leadership.leader is not None
    opened(url, tmp_path, "two", gone=leadership.leader.epoch).close()
    watch.close()


def test_one_of_many_takes_an_ended_lease(url: str, tmp_path: Path) -> None:
    """Each other one is told that the ledger is held, and the epochs are unique."""
    before = opened(url, tmp_path, "one", seconds=0.01)
    results: list[Store | StoreError] = []

    def take(name: str) -> None:
        try:
            results.append(opened(url, tmp_path, name))
        except StoreError as error:
            results.append(error)

    threads = [threading.Thread(target=take, args=(f"s{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leaders = [each for each in results if isinstance(each, Store)]
    assert [type(each) for each in results if each not in leaders] == [LedgerHeld] * 5
    assert [each.claim.epoch for each in leaders] == [2]
    for store in (*leaders, before):
        store.close()


def test_two_first_openings_make_one_ledger(url: str, tmp_path: Path) -> None:
    """Both start on an empty database: one leads, and the other one waits."""
    results, stores = list[str](), list[Store]()

    def first(name: str) -> None:
        try:
            stores.append(opened(url, tmp_path, name))
        except LedgerHeld:
            results.append("held")

    threads = [threading.Thread(target=first, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (results, len(stores)) == (["held"], 1)
    stores[0].close()


def test_a_standby_is_shown_to_the_leader(url: str, leader: Store) -> None:
    """With what it has not copied, until it ends."""
    watch = LeaseWatch(url, "two")
    keeper = LeaseKeeper(url, leader.claim.epoch, 10.0)
    watch.note(0)
    watch.note(12)
    (standby,) = keeper.renew().standbys
    assert (standby.directory, standby.behind_bytes) == ("two", 12)
    watch.forget()
    assert keeper.renew().standbys == []
    watch.close()
    keeper.close()
