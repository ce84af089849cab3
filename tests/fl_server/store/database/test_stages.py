"""What the ledger keeps of rounds with secure aggregation."""

from __future__ import annotations

from fl_server.store.database.store import Store
from fl_server.store.records import AnswerRecord, StageRecord
from tests.fl_server.store.records import a_run, an_attempt, why


def a_stage(stage: str = "sharing", attempt: int = 0) -> StageRecord:
    """A stage of the first round."""
    return StageRecord("r1", 0, 0, attempt, stage, ("a", "b"), ("a", "b"), 1.0)


def test_a_stage_and_its_time_are_written_together(store: Store) -> None:
    """After a kill behind the write the stage has its own time, and not what the one before had left."""
    store.open_attempt(an_attempt())
    store.set_seconds_left("r1", {(0, 0, 0): 1.5})
    store.open_stage(a_stage(), 60.0, why("stage_opened"))
    assert [attempt.seconds_left for attempt in store.attempts("r1", 0)] == [60.0]
    store.set_seconds_left("r1", {(0, 0, 0): 20.0})
    store.open_stage(a_stage(), 60.0)
    assert [attempt.seconds_left for attempt in store.attempts("r1", 0)] == [20.0]
    assert store.stages("r1", 0) == [a_stage()]


def test_a_first_answer_stands(store: Store) -> None:
    """Another answer to the same stage changes nothing."""
    answer = AnswerRecord("r1", 0, 0, 0, "agreeing", "a", b"keys")
    assert store.add_answer(answer) == b"keys"
    assert store.add_answer(AnswerRecord("r1", 0, 0, 0, "agreeing", "a", b"others")) == b"keys"
    assert store.answers("r1", 0, 0) == {"agreeing": {"a": b"keys"}}


def test_a_restarted_round_keeps_the_number_of_its_draws_alone(store: Store) -> None:
    """Stages and answers are gone; an attempt without clients says how often the round was drawn."""
    store.open_attempt(an_attempt())
    store.open_stage(a_stage(), 60.0)
    store.add_answer(AnswerRecord("r1", 0, 0, 0, "agreeing", "a", b"keys"))
    store.restart_round(a_run(), 0, why("round_restarted"), 3)
    assert (store.stages("r1", 0), store.answers("r1", 0, 0)) == ([], {})
    assert [(attempt.attempt, attempt.cohort) for attempt in store.attempts("r1", 0)] == [(2, ())]
