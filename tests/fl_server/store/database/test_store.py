"""The behaviour of every ledger, on any database."""

import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from fl_server.store.errors import StoreError
from fl_server.store.protocol import Store
from fl_server.store.records import ClientStateRecord, only_banned
from tests.fl_server.store.records import a_client, a_commit, a_refusal_record, a_run, an_attempt, an_update, why


def events(store: Store, subject: str = "") -> list[str]:
    """The events of the history, oldest first."""
    return [entry.event for entry in store.history(subject)]


def counters(store: Store, client_id: str = "a") -> tuple[int, int]:
    """A client's numbers of counted and refused updates."""
    client = next(each for each in store.clients() if each.client_id == client_id)
    return client.updates_counted, client.updates_refused


def test_a_ledger_has_an_id(empty_store: Store) -> None:
    """It exists from the start and never changes."""
    assert len(empty_store.coordinator_id) == 32
    assert empty_store.coordinator_id == empty_store.coordinator_id


def test_a_run_is_read_as_it_was_written(empty_store: Store) -> None:
    """Every field is kept, including the nested configuration."""
    run = a_run(reason="too few", ended_at=99.5, elapsed_s=3.25, state_epoch=2, extended_at=4)
    empty_store.create_run(run, why("created"))
    assert empty_store.runs() == [run]
    assert empty_store.history() == [why("created")]


def test_a_run_id_is_unique(store: Store) -> None:
    """A second run with the same id is refused, and neither run nor history changes."""
    with pytest.raises(StoreError, match="there is a run 'r1' already; choose another id"):
        store.create_run(a_run(state="failed"), why("again"))
    assert store.runs() == [a_run()]
    assert events(store) == ["created"]


def test_runs_are_sorted_by_age(store: Store) -> None:
    """By the time of creation, not by the order of writing."""
    store.create_run(a_run("older", created_at=9.0), why())
    assert [run.run_id for run in store.runs()] == ["older", "r1"]


def test_an_updated_run_replaces_the_old_one(store: Store) -> None:
    """The new values and the history entry are stored together."""
    store.update_run(a_run(state="paused"), why("paused"))
    assert store.runs() == [a_run(state="paused")]
    assert events(store) == ["created", "paused"]


def test_a_run_can_be_updated_without_a_history_entry(store: Store) -> None:
    """Elapsed time is written often and is not a change of state."""
    store.update_run(a_run(elapsed_s=5.0))
    assert store.runs()[0].elapsed_s == 5.0
    assert events(store) == ["created"]


def test_an_unknown_run_cannot_be_updated(store: Store) -> None:
    """An update never creates a run or a history entry."""
    with pytest.raises(StoreError, match="no run 'r2'"):
        store.update_run(a_run("r2"), why("paused"))
    assert events(store) == ["created"]


def test_attempts_are_sorted_by_exchange_and_number(store: Store) -> None:
    """Attempts are in the order of the round; a cohort keeps its order."""
    later, second, first = an_attempt(0, exchange=1), an_attempt(1, cohort=("c",)), an_attempt(0, cohort=("b", "a"))
    for attempt in (later, second, first):
        store.open_attempt(attempt)
    assert store.attempts("r1", 0) == [first, second, later]
    assert store.attempts("r1", 1) == []


def test_an_attempt_opens_once(store: Store) -> None:
    """A cohort is final: the same attempt cannot get another one."""
    store.open_attempt(an_attempt())
    with pytest.raises(StoreError, match="could not open attempt 0 of run 'r1' round 0: it exists already"):
        store.open_attempt(an_attempt(cohort=("z",)))
    assert store.attempts("r1", 0) == [an_attempt()]


def test_writing_the_same_attempt_twice_is_no_error(store: Store) -> None:
    """A writer that does not know whether its first write was stored repeats it."""
    for _ in range(2):
        store.open_attempt(an_attempt())
    assert store.attempts("r1", 0) == [an_attempt()]


def test_the_time_left_belongs_to_one_attempt(store: Store) -> None:
    """The last value is kept, without a history entry. A missing attempt is ignored."""
    first, second = an_attempt(0), replace(an_attempt(1, cohort=("c",)), seconds_left=600.0)
    for attempt in (first, second):
        store.open_attempt(attempt)
    for seconds in (595.0, 12.25):
        store.set_seconds_left("r1", (0, 0, 1), seconds)
    store.set_seconds_left("r1", (7, 0, 0), 3.0)
    assert store.attempts("r1", 0) == [first, replace(second, seconds_left=12.25)]
    assert events(store) == ["created"]


def test_an_attempt_needs_its_run(store: Store) -> None:
    """An attempt of an unknown run is refused."""
    with pytest.raises(StoreError, match="its run is unknown"):
        store.open_attempt(replace(an_attempt(), run_id="r2"))


def test_an_update_is_read_as_it_was_written(store: Store) -> None:
    """Every field is kept."""
    update = an_update(num_steps=3, training_loss=0.25, clip_factor=0.5, attempt=1, received_at=12.5, size_bytes=2**40)
    assert store.record_update(update) == update
    assert store.update_of("r1", 0, 0, "a") == update


@pytest.mark.parametrize("second", [{"digest": b"\2" * 32}, {"admitted": False, "reason": "NON_FINITE"}, {}])
def test_the_first_verdict_on_an_update_is_final(store: Store, second: dict[str, Any]) -> None:
    """A second record for the same (run, round, exchange, client) changes nothing and returns the first."""
    first = store.record_update(an_update())
    assert store.record_update(replace(an_update(), **second)) == first
    assert store.updates("r1", 0, 0) == [first]
    assert counters(store) == (0, 0)


def test_a_refused_update_may_have_no_finite_norm(store: Store) -> None:
    """A NaN norm is kept: it is the reason of the refusal."""
    store.record_update(an_update(admitted=False, reason="NON_FINITE", norm=math.nan, training_loss=math.nan))
    found = store.update_of("r1", 0, 0, "a")
    assert found is not None
    assert math.isnan(found.norm)
    assert found.training_loss is None


def test_nul_characters_can_be_written(store: Store) -> None:
    """A NUL in a client's text becomes U+FFFD, because databases refuse it. Labels are JSON and keep it."""
    store.put_clients([a_client(software="a\0b", labels={"site": "n\0"})])
    store.record_update(an_update(detail="\0", admitted=False))
    assert (store.clients()[0].software, store.clients()[0].labels) == ("a\ufffdb", {"site": "n\0"})
    assert store.updates("r1", 0, 0)[0].detail == "\ufffd"


def test_floats_are_kept_bit_for_bit(store: Store) -> None:
    """Also doubles that need 17 digits, the smallest and the largest."""
    for number, value in enumerate((0.1, 1 / 3, 5e-324, 1.7976931348623157e308)):
        store.record_update(an_update(f"c{number}", norm=value))
        assert store.updates("r1", 0, 0)[-1].norm.hex() == value.hex()


def test_an_infinite_norm_is_kept(store: Store) -> None:
    """Infinity is not a missing value."""
    store.record_update(an_update(admitted=False, norm=math.inf))
    assert store.updates("r1", 0, 0)[0].norm == math.inf


def test_refusals_are_counted_once(store: Store) -> None:
    """A refused update is counted for its client, and its repeat is not."""
    for _ in range(2):
        store.record_update(an_update(admitted=False, reason="WRONG_SHAPE"))
    assert counters(store, "a") == (0, 1)
    assert counters(store, "b") == (0, 0)


def test_an_update_of_a_forgotten_client_is_recorded(store: Store) -> None:
    """A client may be forgotten while its update is being sent."""
    store.record_update(an_update("gone", admitted=False))
    assert [update.client_id for update in store.updates("r1", 0, 0)] == ["gone"]


def test_updates_are_sorted_by_id_bytes(store: Store) -> None:
    """Upper case before lower case: the order of reductions."""
    for client_id in ("b", "a", "B", "_", "a.1"):
        store.record_update(an_update(client_id))
    assert [update.client_id for update in store.updates("r1", 0, 0)] == ["B", "_", "a", "a.1", "b"]


def test_exchanges_and_rounds_are_separate(store: Store) -> None:
    """An update is found only under its round and exchange."""
    store.record_update(replace(an_update(), exchange=1))
    assert store.update_of("r1", 0, 0, "a") is None
    assert store.updates("r1", 1, 1) == []


def test_a_dropped_update_can_be_sent_again(store: Store) -> None:
    """After its record is removed the next verdict is the first, and the history has the reason."""
    store.record_update(an_update())
    store.drop_update("r1", 0, 0, "a", why("torn"))
    again = an_update(digest=b"\3" * 32)
    assert store.record_update(again) == again
    assert events(store) == ["created", "torn"]


def test_dropping_a_missing_update_does_nothing(store: Store) -> None:
    """There is no history entry."""
    store.drop_update("r1", 0, 0, "a", why("torn"))
    assert events(store) == ["created"]


def test_an_accepted_list_is_read_as_it_was_written(store: Store) -> None:
    """None before; afterwards the pairs in their order."""
    assert store.accepted("r1", 0, 0) is None
    store.fix_accepted("r1", 0, 0, [("b", b"\xff"), ("a", b"\0")])
    assert store.accepted("r1", 0, 0) == [("b", b"\xff"), ("a", b"\0")]


def test_an_accepted_update_can_be_refused_later(store: Store) -> None:
    """Its record has the refusal, and the list is removed and can be written again. A repeat changes nothing."""
    taken, bad = [store.record_update(an_update(name, norms={"delta": 2.5})) for name in "ab"]
    store.fix_accepted("r1", 0, 0, [("a", b"\1"), ("b", b"\1")])
    refused = replace(bad, admitted=False, reason="REFUSAL_REASON_NORM", detail="too long")
    for _ in range(2):
        store.refuse_accepted([refused], [a_refusal_record("b")], [why("dropped"), why("quarantined", "b")])
        assert store.updates("r1", 0, 0) == [taken, refused]
    assert (store.accepted("r1", 0, 0), store.refusal_records()) == (None, [a_refusal_record("b")])
    assert (counters(store, "a"), counters(store, "b")) == ((0, 0), (0, 1))
    assert (events(store, "r1"), events(store, "b")) == (["created", "dropped"], ["quarantined"])
    store.fix_accepted("r1", 0, 0, [("a", b"\1")])


def test_a_committed_list_is_final(store: Store) -> None:
    """An update that is part of a model cannot be refused."""
    bad = store.record_update(an_update())
    store.fix_accepted("r1", 0, 0, [("a", b"\1")])
    store.commit(a_commit(), why("committed"))
    with pytest.raises(StoreError, match="is committed: its list stands"):
        store.refuse_accepted([replace(bad, admitted=False)], [], [])
    assert store.updates("r1", 0, 0) == [bad]


def test_norms_by_vector_are_kept(store: Store) -> None:
    """All of them, bit for bit. Records of older versions have none."""
    norms = {"delta": 0.1 + 0.2, "full_gradient": 1e30, "buffers": 0.0}
    store.record_update(an_update("a", norms=norms))
    store.record_update(an_update("b"))
    assert [update.norms for update in store.updates("r1", 0, 0)] == [norms, None]


def test_an_empty_accepted_list_is_a_list(store: Store) -> None:
    """An empty list differs from a list that is not written yet."""
    store.fix_accepted("r1", 0, 0, [])
    assert store.accepted("r1", 0, 0) == []


def test_the_same_accepted_list_twice_is_no_error(store: Store) -> None:
    """A coordinator that was killed after the write repeats it."""
    for _ in range(2):
        store.fix_accepted("r1", 0, 0, [("a", b"\1")])
    assert store.accepted("r1", 0, 0) == [("a", b"\1")]


@pytest.mark.parametrize("other", [[("a", b"\2")], [], [("a", b"\1"), ("b", b"\1")]], ids=["digest", "none", "more"])
def test_another_accepted_list_is_refused(store: Store, other: list[tuple[str, bytes]]) -> None:
    """The first list is final, because it defines the round."""
    store.fix_accepted("r1", 0, 0, [("a", b"\1")])
    with pytest.raises(StoreError, match="the first one stands"):
        store.fix_accepted("r1", 0, 0, other)
    assert store.accepted("r1", 0, 0) == [("a", b"\1")]


def test_a_commit_is_read_as_it_was_written(store: Store) -> None:
    """Every field is kept, and commits are sorted by round."""
    second = a_commit(
        1, training_loss=None, metrics={"accuracy": 0.5}, epochs=({"loss": 2.0}, {"loss": 1.5, "f1": 0.1})
    )
    first = a_commit(0, over_selection=1.25)
    for commit in (second, first):
        store.commit(commit, why("committed"))
    assert store.commits("r1") == [first, second]


def test_the_metrics_of_local_epochs_are_read_as_they_were_written(store: Store) -> None:
    """In their order, with every name."""
    update = an_update(epochs=({"loss": 2.0, "accuracy": 0.25}, {}, {"loss": 1.5}))
    store.record_update(update)
    assert store.updates("r1", 0, 0) == [update]


def test_a_commit_counts_each_accepted_client_once(store: Store) -> None:
    """In a round of two exchanges "b" dropped out after the first: only "a" is counted, and once."""
    store.fix_accepted("r1", 0, 0, [("a", b"\1"), ("b", b"\1")])
    store.fix_accepted("r1", 0, 1, [("a", b"\2")])
    store.commit(a_commit(), why("committed"))
    assert (counters(store, "a"), counters(store, "b")) == ((1, 0), (0, 0))


def test_a_client_left_out_of_a_commit_is_not_counted(store: Store) -> None:
    """The reducer used "a" and not "b": the record of "b" has the reason, and only the counter of "a" changes."""
    store.fix_accepted("r1", 0, 0, [("a", b"\1"), ("b", b"\1")])
    taken, left = [store.record_update(an_update(name)) for name in "ab"]
    store.commit(a_commit(), why("committed"), ["b"])
    assert (counters(store, "a")[0], counters(store, "b")[0]) == (1, 0)
    assert store.updates("r1", 0, 0) == [taken, replace(left, reason="REFUSAL_REASON_LEFT_OUT")]
    assert [update.left_out for update in store.updates("r1", 0, 0)] == [False, True]


def test_the_same_commit_twice_changes_nothing(store: Store) -> None:
    """A commit that is repeated after a crash counts no client again and adds no history entry."""
    store.fix_accepted("r1", 0, 0, [("a", b"\1")])
    store.commit(a_commit(), why("committed"))
    store.commit(a_commit(committed_at=77.0), why("committed"))
    assert store.commits("r1") == [a_commit()]
    assert counters(store) == (1, 0)
    assert events(store) == ["created", "committed"]


def test_a_round_has_one_model(store: Store) -> None:
    """A commit of the same round with another model is refused, and the first one stays."""
    store.commit(a_commit(), why())
    with pytest.raises(StoreError, match="committed with model blake3:00; blake3:11 came"):
        store.commit(a_commit(model_digest="blake3:11"), why())
    assert store.commits("r1") == [a_commit()]


def test_metrics_are_added_to_a_commit(store: Store) -> None:
    """An evaluation follows its commit. NaN of a diverged model is kept."""
    store.commit(a_commit(), why())
    store.set_metrics("r1", 0, {"accuracy": 0.875, "loss": math.nan})
    metrics = store.commits("r1")[0].metrics
    assert metrics["accuracy"] == 0.875
    assert math.isnan(metrics["loss"])


def test_the_time_left_to_clients_belongs_to_one_round(store: Store) -> None:
    """The last value is kept, without a history entry. A missing round is ignored."""
    store.commit(a_commit(), why("committed"))
    for round_, seconds in ((0, 60.0), (0, 12.25), (1, 3.0)):
        store.set_clients_seconds_left("r1", round_, seconds)
    assert store.commits("r1") == [a_commit(clients_seconds_left=12.25)]
    assert events(store) == ["created", "committed"]


def test_metrics_need_a_commit(store: Store) -> None:
    """A round that is not committed has no model to evaluate."""
    with pytest.raises(StoreError, match="no committed round 3"):
        store.set_metrics("r1", 3, {"accuracy": 1.0})


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
    store.put_clients([a_client(updates_counted=50, updates_refused=50, banned=True)])
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


def test_a_refusal_record_is_written_with_the_refused_update(store: Store) -> None:
    """Records are sorted by id bytes. A later refusal replaces the record; a repeated one does nothing."""
    for client_id in "ba":
        store.record_update(an_update(client_id, admitted=False), a_refusal_record(client_id), why("one", client_id))
    assert store.refusal_records() == [a_refusal_record("a"), a_refusal_record("b")]
    longer = a_refusal_record(refusals=3, until=99.5)
    store.record_update(an_update(admitted=False), longer, why("repeat", "a"))
    assert store.refusal_records()[0] == a_refusal_record("a")
    store.record_update(replace(an_update(admitted=False), round=1), longer, why("two", "a"))
    assert (store.refusal_records()[0], events(store, "a")) == (longer, ["one", "two"])


def test_an_unknown_client_gets_no_refusal_record(store: Store) -> None:
    """It was forgotten while its update was being sent, and another client may get its name."""
    store.record_update(an_update("gone", admitted=False), a_refusal_record("gone"), why("quarantined", "gone"))
    assert (store.refusal_records(), events(store, "gone")) == ([], [])


def test_a_counted_update_clears_the_refusal_record(store: Store) -> None:
    """A quarantine that has not ended at the commit stays, and so do records of other clients."""
    for client_id, until in {"a": 20.0, "b": 20.5}.items():
        store.record_update(an_update(client_id, admitted=False), a_refusal_record(client_id, until=until))
    store.put_clients([a_client("c")])
    store.record_update(an_update("c", admitted=False), a_refusal_record("c"))
    store.fix_accepted("r1", 1, 0, [("a", b"\1"), ("b", b"\2")])
    store.commit(a_commit(1, committed_at=20.0), why())
    assert [record.client_id for record in store.refusal_records()] == ["b", "c"]


def test_a_refusal_record_can_be_cleared(store: Store) -> None:
    """With a history entry, if there was a record. A forgotten client's record is removed too."""
    for client_id in "ab":
        store.record_update(an_update(client_id, admitted=False), a_refusal_record(client_id))
    assert [store.clear_refusal_record("a", why("released", "a")) for _ in range(2)] == [True, False]
    store.forget_client("b", why("forgotten", "b"))
    assert (store.refusal_records(), events(store, "a")) == ([], ["released"])


def test_history_returns_the_latest_entries_oldest_first(empty_store: Store) -> None:
    """With a limit of two, the last two of five entries in the order of writing."""
    for number in range(5):
        empty_store.add_history(why(str(number)))
    assert [entry.event for entry in empty_store.history(limit=2)] == ["3", "4"]
    assert empty_store.history(limit=0) == []


def test_history_is_kept_by_subject(empty_store: Store) -> None:
    """With a subject, only its entries; without one, all entries."""
    for subject in ("r1", "a", "r1"):
        empty_store.add_history(why(subject=subject))
    assert [entry.subject for entry in empty_store.history("r1")] == ["r1", "r1"]
    assert len(empty_store.history()) == 3


def test_another_thread_may_use_the_store(store: Store) -> None:
    """A worker thread did not open the ledger."""
    worker = threading.Thread(target=store.record_update, args=[an_update()])
    worker.start()
    worker.join()
    assert store.updates("r1", 0, 0) == [an_update()]


def test_a_refusal_record_can_be_written_without_an_update(store: Store) -> None:
    """With its history entry. An unknown client is ignored."""
    store.put_refusal_record(a_refusal_record("a", failures=4), why("one", "a"))
    store.put_refusal_record(a_refusal_record("gone"), why("two", "gone"))
    assert store.refusal_records() == [a_refusal_record("a", failures=4)]
    assert (events(store, "a"), events(store, "gone")) == (["one"], [])


def test_client_state_records_are_read_as_they_were_written(store: Store) -> None:
    """Sorted by id, the latest of each client, with a refusal record. An unknown client is ignored."""
    first = ClientStateRecord("r1", "a", losses=1, lost_epoch=0, lost_round=3, reason="gone")
    then = replace(first, losses=2, lost_epoch=1, warned_round=7)
    other = ClientStateRecord("r1", "b", warned_round=2**31 - 1)
    store.put_client_state_records([first])
    store.put_client_state_records(
        [other, then, replace(first, client_id="gone")], a_refusal_record("a"), [why("lost")]
    )
    assert store.client_state_records("r1") == [then, other]
    assert store.client_state_records("r2") == []
    assert (store.refusal_records(), events(store)) == ([a_refusal_record("a")], ["created", "lost"])


def test_releasing_a_client_resets_its_losses(store: Store) -> None:
    """They are zero in every run, and the other fields stay. A second release changes nothing."""
    store.create_run(a_run("r2"), why("created", "r2"))
    lost = [ClientStateRecord(run, "a", losses=3, lost_epoch=1, lost_round=4) for run in ("r1", "r2")]
    store.put_client_state_records([*lost, ClientStateRecord("r1", "b", losses=1)])
    assert [store.clear_refusal_record("a", why("released", "a")) for _ in range(2)] == [True, False]
    assert store.client_state_records("r1") == [replace(lost[0], losses=0), ClientStateRecord("r1", "b", losses=1)]
    assert store.client_state_records("r2") == [replace(lost[1], losses=0)]
    assert events(store, "a") == ["released"]


def test_a_forgotten_client_has_no_state_records(store: Store) -> None:
    """After a new registration it starts from zero."""
    store.put_client_state_records([ClientStateRecord("r1", "a", losses=3), ClientStateRecord("r1", "b", losses=1)])
    store.forget_client("a", why("forgotten", "a"))
    assert [each.client_id for each in store.client_state_records("r1")] == ["b"]


def test_updates_of_one_client(store: Store) -> None:
    """Only of the given rounds and exchange, and of no other client."""
    for client_id in ("a", "b"):
        for round_, exchange in ((0, 0), (1, 0), (1, 1), (2, 0)):
            store.record_update(replace(an_update(client_id), round=round_, exchange=exchange))
    found = store.updates_of("r1", 0, [0, 1, 9, 2**32 - 1], "a")
    assert {(each.client_id, each.round, each.exchange) for each in found} == {("a", 0, 0), ("a", 1, 0)}
    assert store.updates_of("r1", 0, [], "a") == []
    assert store.updates_of("r1", 2**32 - 1, [0], "a") == []
    assert store.update_of("r1", 2**32 - 1, 2**32 - 1, "a") is None
