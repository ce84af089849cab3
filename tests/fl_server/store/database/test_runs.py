"""Runs, attempts and history in every ledger, on any database."""

from dataclasses import replace

import pytest

from fl_server.store.database.store import Store
from fl_server.store.errors import StoreError
from fl_server.store.records import FailureRecord
from tests.fl_server.store.records import a_run, an_attempt, events, why


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
        store.set_seconds_left("r1", {(0, 0, 1): seconds})
    store.set_seconds_left("r1", {(7, 0, 0): 3.0})
    assert store.attempts("r1", 0) == [first, replace(second, seconds_left=12.25)]
    assert events(store) == ["created"]


def test_an_attempt_needs_its_run(store: Store) -> None:
    """An attempt of an unknown run is refused."""
    with pytest.raises(StoreError, match="its run is unknown"):
        store.open_attempt(replace(an_attempt(), run_id="r2"))


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


def test_failed_work_is_kept_by_round_and_client(store: Store) -> None:
    """The newest record of a client stands, the latest failure is found, and a restarted round has none."""
    store.put_failure(FailureRecord("r1", 0, 0, "a", restarts=1, instance_id="second"))
    assert store.latest_failure("r1") is None
    failed = FailureRecord("r1", 0, 0, "a", 1, 1, "second", "KeyError (x.py, line 1)", "no age", failed_at=5.0)
    later = replace(failed, client_id="b", failed_at=6.0)
    store.put_failure(failed)
    store.put_failure(later, why("client_failed"))
    assert store.failures("r1", 0) == [failed, later]
    assert store.latest_failure("r1") == later
    store.restart_round(a_run(), 0, why())
    assert store.failures("r1", 0) == []
    assert events(store, "r1").count("client_failed") == 1
