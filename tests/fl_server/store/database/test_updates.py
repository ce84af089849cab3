"""Updates, accepted lists and commits in every ledger, on any database."""

import math
import threading
from dataclasses import replace
from typing import Any

import pytest

from fl_server.store.database.store import Store
from fl_server.store.errors import StoreError
from fl_server.store.records import FailureRecord, Weighed
from tests.fl_server.store.records import (
    a_client,
    a_commit,
    a_quarantine_record,
    an_update,
    counters,
    events,
    why,
)


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
        store.refuse_accepted([refused], [a_quarantine_record("b")], [why("dropped"), why("quarantined", "b")])
        assert store.updates("r1", 0, 0) == [taken, refused]
    assert (store.accepted("r1", 0, 0), store.quarantine_records()) == (None, [a_quarantine_record("b")])
    assert (counters(store, "a"), counters(store, "b")) == ((0, 0), (0, 1))
    assert (events(store, "r1"), events(store, "b")) == (["created", "dropped"], ["quarantined"])
    store.fix_accepted("r1", 0, 0, [("a", b"\1")])


def test_work_counts_for_its_package_once(store: Store) -> None:
    """An admitted update, one that is refused later, and a failure; each is repeated, as after a kill."""
    taken, bad = [an_update(name) for name in "ab"]
    failed = FailureRecord("r1", 1, 0, "a", failures=1, detail="no", failed_at=2.0)
    for _ in range(2):
        store.record_updates([Weighed(taken, package="p"), Weighed(bad, package="p")])
        store.put_failure(failed, package="p")
    store.fix_accepted("r1", 0, 0, [("a", b"\1"), ("b", b"\1")])
    refused = replace(bad, admitted=False, reason="REFUSAL_REASON_NORM")
    for _ in range(2):
        store.refuse_accepted([refused], [], [], packages={"b": "p"})
    assert [dict(client.work.packages) for client in store.clients_of(["a", "b"])] == [{"p": (2, 1)}, {"p": (1, 1)}]


def test_a_committed_list_is_final(store: Store) -> None:
    """An update that is part of a model cannot be refused."""
    bad = store.record_update(an_update())
    store.fix_accepted("r1", 0, 0, [("a", b"\1")])
    store.commit(a_commit(), why("committed"))
    with pytest.raises(StoreError, match="is committed: its list stands"):
        store.refuse_accepted([replace(bad, admitted=False)], [], [])
    assert store.updates("r1", 0, 0) == [bad]


def test_norms_by_vector_are_kept(store: Store) -> None:
    """All of them, bit for bit. A record without norms keeps none."""
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
    """A commit of the same round with another model, or averaged model, is refused, and the first one stays."""
    store.commit(a_commit(), why())
    with pytest.raises(StoreError, match="committed with averaged model None; blake3:22 came"):
        store.commit(a_commit(averaged_digest="blake3:22"), why())
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


def test_another_thread_may_use_the_store(store: Store) -> None:
    """A worker thread did not open the ledger."""
    worker = threading.Thread(target=store.record_update, args=[an_update()])
    worker.start()
    worker.join()
    assert store.updates("r1", 0, 0) == [an_update()]


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


def test_what_a_client_states_is_kept_until_it_is_not_shared(store: Store) -> None:
    """The latest admitted update counts; one that was refused does not, nor does one without privacy."""
    store.put_clients([a_client()])

    def stated(round_: int, **changes: Any) -> tuple[float | None, float | None]:
        store.record_update(replace(an_update(), round=round_, **changes))
        work = store.work_of(["a"])["a"]
        return work.epsilon, work.delta

    assert stated(0, epsilon=0.5, delta=1e-5) == (0.5, 1e-5)
    assert store.updates("r1", 0, 0)[0].epsilon == 0.5
    assert stated(1, epsilon=9.0, delta=1e-5, admitted=False) == (0.5, 1e-5)
    assert stated(2) == (0.5, 1e-5)
    assert stated(3, epsilon=0.75, delta=1e-6) == (0.75, 1e-6)
    assert stated(4, delta=1e-6) == (None, None)
