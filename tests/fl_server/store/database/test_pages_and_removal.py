"""Parts of lists, totals, and removal in the ledger, on every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_server.store.database.store import Store
from fl_server.store.errors import StoreError
from fl_server.store.records import DELETING, AttemptRecord, ClientEvaluation, HistoryRecord, TotalsRecord
from tests.fl_server.store.records import a_client, a_commit, a_run, an_attempt, an_update, why


def test_parts_of_lists(store: Store) -> None:
    """By key and number, in the order of id bytes: capitals come before small letters in every language."""
    for round_ in range(4):
        store.commit(a_commit(round_, state_epoch=round_ // 2), why())
    for client in ("b", "a", "B", "A-1"):
        store.record_evaluation(ClientEvaluation("r1", 3, client, 1, {}, 1.0))
    store.put_clients([a_client("B"), a_client("A-1")])
    assert [commit.round for commit in store.commits("r1", 1, 2)] == [1, 2]
    assert store.commits("r1", 2**40) == []
    assert store.state_epochs("r1", [0, 3, 9]) == {0: 0, 3: 1}
    assert [answer.client_id for answer in store.evaluations("r1", 3)] == ["A-1", "B", "a", "b"]
    assert [answer.client_id for answer in store.evaluations("r1", 3, "A-1", 2)] == ["B", "a"]
    assert [client.client_id for client in store.clients_of(["b", "B", "x"])] == ["B", "b"]


def test_the_newest_lines_of_history_in_parts(store: Store) -> None:
    """From the first to the last of the newest lines; later lines are outside."""
    for number in range(5):
        store.add_history(why(f"event {number}", "s"))
        store.add_history(why("other", "t"))
    span = store.history_span("s", 3)
    store.add_history(why("later", "s"))
    first = store.history_between("s", span, 2)
    rest = store.history_between("s", (first[-1][0] + 1, span[1]), 2)
    assert [line.event for _, line in [*first, *rest]] == ["event 2", "event 3", "event 4"]
    assert [line.event for _, line in store.history_between("", store.history_span("", 2), 9)] == ["other", "later"]
    assert store.history_between("none", store.history_span("none", 5), 5) == []


def test_lines_of_history_before_a_number(store: Store) -> None:
    """The newest ones of those with smaller numbers."""
    for number in range(5):
        store.add_history(why(f"event {number}", "s"))
    first, last = store.history_span("s", 2)
    before = store.history_span("s", 2, first)
    assert [line.event for _, line in store.history_between("s", before, 9)] == ["event 1", "event 2"]
    assert before[1] < first < last
    assert store.history_span("s", 2, 1) == (0, -1)


def test_who_waits_for_lines_of_history(store: Store) -> None:
    """Is called once after each transaction with some, when they can be read; never for one that is rolled back."""
    seen: list[list[str]] = []
    store.after_history(lambda: seen.append([line.event for line in store.history("s")]))
    store.add_history(why("one", "s"))
    store.put_clients([a_client("a")], [why("two", "s"), why("three", "s")])
    store.put_clients([a_client("b")])
    assert seen == [["one"], ["one", "two", "three"]]
    with pytest.raises(StoreError):
        store.update_run(a_run("unknown"), why("four", "s"))
    with pytest.raises(StoreError):
        store.create_run(a_run(), why("five", "s"))
    store.put_clients([a_client("c")])
    assert len(seen) == 2
    store.after_history(None)
    store.add_history(why("six", "s"))
    assert len(seen) == 2


def test_newest_values_and_counts(store: Store) -> None:
    """Of the metric of each run, oldest first; a metric whose name has the other's in it is another one."""
    for round_ in range(4):
        metrics = {"accuracy": round_ / 4} if round_ % 2 else {"clients_accuracy": 1.0}
        store.commit(a_commit(round_, metrics=metrics), why())
    assert store.newest_values({"r1": "accuracy", "r2": "loss"}, 5) == {"r1": [(1, 0.25), (3, 0.75)], "r2": []}
    assert store.newest_values({"r1": "accuracy"}, 1) == {"r1": [(3, 0.75)]}
    store.put_clients([a_client("z")])
    assert store.update_counts()["z"] == 0


def test_rounds_with_answers_and_no_summary(store: Store) -> None:
    """A summary of no answers counts as one."""
    for round_ in range(3):
        store.commit(a_commit(round_), why())
    for round_ in (1, 2):
        store.record_evaluation(ClientEvaluation("r1", round_, "a", 1, {}, 1.0))
    assert (store.rounds_to_summarise("r1"), store.rounds_to_summarise("r1", 2)) == ([1, 2], [2])
    store.set_metrics("r1", 1, {"loss": 0.5, "clients_evaluated": 0.0})
    assert store.rounds_to_summarise("r1") == [2]


def test_late_metrics_remove_the_totals(store: Store) -> None:
    """Only those that the round is part of."""
    for round_ in range(4):
        store.commit(a_commit(round_), why())
    assert store.totals("r1") is None
    store.put_totals(TotalsRecord("r1", 1, "{}"))
    store.put_totals(TotalsRecord("r1", 3, '{"a":1}'))
    store.set_metrics("r1", 3, {"loss": 1.0})
    assert store.totals("r1") == TotalsRecord("r1", 3, '{"a":1}')
    store.set_metrics("r1", 2, {"loss": 1.0})
    assert store.totals("r1") is None


def test_old_rounds_are_removed_in_steps(store: Store) -> None:
    """Ten at a time; commits stay, and so do later rounds and other runs."""
    store.create_run(a_run("r2"), why())
    for round_ in range(30):
        store.open_attempt(replace(an_attempt(), round=round_))
        store.fix_accepted("r1", round_, 0, [("a", b"\1")])
        store.commit(a_commit(round_), why())
    store.open_attempt(AttemptRecord("r2", 0, 0, 0, ("a",), 1.0))
    assert [store.remove_rounds("r1", 25) for _ in range(4)] == [True, True, False, False]
    assert [round_ for round_ in range(30) if store.attempts("r1", round_)] == list(range(25, 30))
    assert [round_ for round_ in range(30) if store.accepted("r1", round_, 0)] == list(range(25, 30))
    assert (len(store.commits("r1")), len(store.attempts("r2", 0))) == (30, 1)


def test_a_run_is_removed_except_its_id(store: Store) -> None:
    """Only one that is being deleted. Operators' lines stay, and the same call again changes nothing."""
    store.open_attempt(an_attempt())
    store.record_update(an_update())
    store.commit(a_commit(0), replace(why(subject="r1"), actor="coordinator"))
    store.put_totals(TotalsRecord("r1", 1, "{}"))
    with pytest.raises(StoreError, match="run 'r1' is waiting: only one that is being deleted is removed"):
        store.remove_run("r1", why())
    with pytest.raises(StoreError, match="run 'r9' is unknown"):
        store.remove_run("r9", why())
    marked = HistoryRecord(2.0, "coordinator", "run_deleted", "r1", "retention.keep_runs = 1")
    store.update_run(a_run(state=DELETING), marked)
    assert [run.state for run in store.runs()] == [DELETING]
    assert not store.remove_run_history("r1")
    for _ in range(2):
        store.remove_run("r1", why("run_removed"))
    assert (store.runs(), store.deleted_runs(), store.totals("r1"), store.commits("r1")) == ([], ["r1"], None, [])
    assert [line.event for line in store.history("r1")] == ["created", "run_deleted", "run_removed"]
    with pytest.raises(StoreError, match="there is a run 'r1' already"):
        store.create_run(a_run(), why())


def test_the_ledger_keeps_sums_until_the_round_has_the_clients_metrics(store: Store) -> None:
    """They are read page by page in the order of ids, and never with the list of evaluations."""
    store.commit(a_commit(3), why())
    for client in ("b", "a"):
        sums = [("f1", "counts", [2], [0.1, 3.0])]
        store.record_evaluation(ClientEvaluation("r1", 3, client, 1, {"f1": 0.5}, 1.0, sums))
    assert [(each.client_id, each.sums) for each in store.evaluations("r1", 3)] == [("a", ()), ("b", ())]
    expected = [["f1", "counts", [2], [0.1, 3.0]]]
    assert store.evaluation_sums("r1", 3, "", 1) == [("a", expected)]
    assert store.evaluation_sums("r1", 3, "a", 9) == [("b", expected)]
    store.set_metrics("r1", 3, {"loss": 0.5})
    assert store.evaluation_sums("r1", 3, "a", 9) == [("b", expected)]
    store.set_metrics("r1", 3, {"loss": 0.5, "clients_evaluated": 2.0, "clients_f1": 0.5})
    assert store.evaluation_sums("r1", 3, "", 9) == [("a", []), ("b", [])]


def test_the_ledger_has_the_draws_of_rounds_with_a_fixed_list(store: Store) -> None:
    """All attempts of the first exchange, and the list of the last one; a round under way is left out."""
    for exchange, attempt, cohort in ((0, 0, ["a", "b"]), (0, 1, ["c"]), (1, 0, ["a", "c"])):
        store.open_attempt(AttemptRecord("r1", 0, exchange, attempt, tuple(cohort), 0.0))
    store.open_attempt(AttemptRecord("r1", 1, 0, 0, ("a",), 0.0))
    store.fix_accepted("r1", 0, 0, [("a", b"1"), ("c", b"2")])
    store.fix_accepted("r1", 0, 1, [("c", b"3")])
    assert store.draws("r1", 0, 9) == {0: (frozenset("abc"), frozenset("c"))}
    assert store.draws("r1", 1, 9) == {}
