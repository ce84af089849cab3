"""Clients, their quarantine records and their state records in every ledger, on any database."""

from dataclasses import replace

from fl_server.store.client_work import ClientWork
from fl_server.store.database.store import Store
from fl_server.store.records import ClientStateRecord, only_banned
from tests.fl_server.store.records import (
    a_client,
    a_commit,
    a_quarantine_record,
    a_run,
    an_update,
    counters,
    events,
    why,
)


def test_a_client_is_read_as_it_was_written(empty_store: Store) -> None:
    """Every field is kept, including labels, device and tasks."""
    client = a_client(
        labels={"site": "north"}, device={"kind": "cuda", "memory_bytes": 2**33}, tasks=({"name": "digits"},),
        present=True, banned=True, draining=True, note="spare", instance_id="i", software="1.0",
    )  # fmt: skip
    empty_store.put_clients([client], [why("registered", "a")])
    assert empty_store.clients() == [client]
    assert events(empty_store, "a") == ["registered"]


def test_clients_are_sorted_by_id_bytes(store: Store) -> None:
    """Sampling uses the same order."""
    store.put_clients([a_client("Z")])
    assert [client.client_id for client in store.clients()] == ["Z", "a", "b"]


def test_many_clients_are_written_at_once(store: Store) -> None:
    """New and known clients in one call. Of two records of one client the later one is kept; counters stay."""
    store.record_update(an_update(admitted=False))
    lines = [why("first", "a"), why("second", "c")]
    store.put_clients([a_client("a", note="1"), a_client("c"), a_client("a", note="2", updates_counted=9)], lines)
    assert [(each.client_id, each.note) for each in store.clients()] == [("a", "2"), ("b", ""), ("c", "")]
    assert counters(store) == (0, 1)
    assert (events(store, "a"), events(store, "c")) == (["first"], ["second"])


def test_writing_a_client_leaves_its_counters(store: Store) -> None:
    """Only updates and commits change counters; those of a client's record are ignored."""
    store.record_update(an_update(admitted=False))
    store.put_clients([a_client(updates_counted=50, work=ClientWork(refused=50), banned=True)])
    assert counters(store) == (0, 1)
    assert store.clients()[0].banned


def test_a_forgotten_client_keeps_its_history(store: Store) -> None:
    """The client's record is removed; its updates and its history stay."""
    store.record_update(an_update())
    assert store.forget_client("a", why("forgotten", "a"))
    assert [client.client_id for client in store.clients()] == ["b"]
    assert store.updates("r1", 0, 0) == [an_update()]
    assert events(store, "a") == ["forgotten"]


def test_a_ban_survives_forgetting(store: Store) -> None:
    """Only name, ban and reason of a banned client stay. Without a ban nothing stays."""
    banned = a_client(
        labels={"site": "north"}, tasks=({"name": "digits"},), banned=True, draining=True, note="bad updates"
    )
    store.put_clients([banned])
    assert store.forget_client("a", why("forgotten", "a"))
    kept = only_banned(banned)
    assert (store.client("a"), kept.note, kept.labels, kept.draining) == (kept, "bad updates", {}, False)
    store.put_clients([a_client("a")])
    assert store.forget_client("a", why("forgotten", "a"))
    assert store.client("a") is None


def test_forgetting_an_unknown_client_returns_false(store: Store) -> None:
    """It is no error, and adds no history entry."""
    assert not store.forget_client("unknown", why("forgotten", "unknown"))
    assert events(store, "unknown") == []


def test_a_quarantine_record_is_written_with_the_refused_update(store: Store) -> None:
    """Records are sorted by id bytes. A later refusal replaces the record; a repeated one does nothing."""
    for client_id in "ba":
        store.record_update(an_update(client_id, admitted=False), a_quarantine_record(client_id), why("one", client_id))
    assert store.quarantine_records() == [a_quarantine_record("a"), a_quarantine_record("b")]
    longer = a_quarantine_record(refusals=3, until=99.5)
    store.record_update(an_update(admitted=False), longer, why("repeat", "a"))
    assert store.quarantine_records()[0] == a_quarantine_record("a")
    store.record_update(replace(an_update(admitted=False), round=1), longer, why("two", "a"))
    assert (store.quarantine_records()[0], events(store, "a")) == (longer, ["one", "two"])


def test_an_unknown_client_gets_no_quarantine_record(store: Store) -> None:
    """It was forgotten while its update was being sent, and another client may get its name."""
    store.record_update(an_update("gone", admitted=False), a_quarantine_record("gone"), why("quarantined", "gone"))
    assert (store.quarantine_records(), events(store, "gone")) == ([], [])


def test_a_counted_update_clears_the_quarantine_record(store: Store) -> None:
    """A quarantine that has not ended at the commit stays, and so do records of other clients."""
    for client_id, until in {"a": 20.0, "b": 20.5}.items():
        store.record_update(an_update(client_id, admitted=False), a_quarantine_record(client_id, until=until))
    store.put_clients([a_client("c")])
    store.record_update(an_update("c", admitted=False), a_quarantine_record("c"))
    store.fix_accepted("r1", 1, 0, [("a", b"\1"), ("b", b"\2")])
    store.commit(a_commit(1, committed_at=20.0), why())
    assert [record.client_id for record in store.quarantine_records()] == ["b", "c"]


def test_a_quarantine_record_can_be_cleared(store: Store) -> None:
    """With a history entry, if there was a record. A forgotten client's record is removed too."""
    for client_id in "ab":
        store.record_update(an_update(client_id, admitted=False), a_quarantine_record(client_id))
    assert [store.clear_quarantine_record("a", why("released", "a")) for _ in range(2)] == [True, False]
    store.forget_client("b", why("forgotten", "b"))
    assert (store.quarantine_records(), events(store, "a")) == ([], ["released"])


def test_a_quarantine_record_can_be_written_without_an_update(store: Store) -> None:
    """With its history entry. An unknown client is ignored."""
    store.put_quarantine_record(a_quarantine_record("a", failures=4), why("one", "a"))
    store.put_quarantine_record(a_quarantine_record("gone"), why("two", "gone"))
    assert store.quarantine_records() == [a_quarantine_record("a", failures=4)]
    assert (events(store, "a"), events(store, "gone")) == (["one"], [])


def test_client_state_records_are_read_as_they_were_written(store: Store) -> None:
    """Sorted by id, the latest of each client, with a quarantine record. An unknown client is ignored."""
    first = ClientStateRecord("r1", "a", losses=1, lost_epoch=0, lost_round=3, reason="gone")
    then = replace(first, losses=2, lost_epoch=1, warned_round=7)
    other = ClientStateRecord("r1", "b", warned_round=2**31 - 1)
    store.put_client_state_records([first])
    store.put_client_state_records(
        [other, then, replace(first, client_id="gone")], a_quarantine_record("a"), [why("lost")]
    )
    assert store.client_state_records("r1") == [then, other]
    assert store.client_state_records("r2") == []
    assert (store.quarantine_records(), events(store)) == ([a_quarantine_record("a")], ["created", "lost"])


def test_releasing_a_client_resets_its_losses(store: Store) -> None:
    """They are zero in every run, and the other fields stay. A second release changes nothing."""
    store.create_run(a_run("r2"), why("created", "r2"))
    lost = [ClientStateRecord(run, "a", losses=3, lost_epoch=1, lost_round=4) for run in ("r1", "r2")]
    store.put_client_state_records([*lost, ClientStateRecord("r1", "b", losses=1)])
    assert [store.clear_quarantine_record("a", why("released", "a")) for _ in range(2)] == [True, False]
    assert store.client_state_records("r1") == [replace(lost[0], losses=0), ClientStateRecord("r1", "b", losses=1)]
    assert store.client_state_records("r2") == [replace(lost[1], losses=0)]
    assert events(store, "a") == ["released"]


def test_a_forgotten_client_has_no_state_records(store: Store) -> None:
    """After a new registration it starts from zero."""
    store.put_client_state_records([ClientStateRecord("r1", "a", losses=3), ClientStateRecord("r1", "b", losses=1)])
    store.forget_client("a", why("forgotten", "a"))
    assert [each.client_id for each in store.client_state_records("r1")] == ["b"]
