"""Words and facts that every surface shows."""

from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from fl_web.facts import words
from fl_web.facts.words import (
    CLIENT_STATES,
    RUN_STATES,
    client_number,
    client_state,
    fact,
    known,
    run_number,
    run_state,
)
from protos.fl.v1 import admin_pb2 as pb


def test_a_fact_without_texts_and_times_is_not_known() -> None:
    """One with a text is told as a whole, also where its time is missing."""
    facts = [fact("a", ""), fact("b", Timestamp()), fact("c", "since ", Timestamp()), fact("d", Timestamp(seconds=1))]
    assert [one.name for one in known(facts)] == ["c", "d"]


@pytest.mark.parametrize("word", RUN_STATES)
def test_a_run_state_is_read_as_it_is_written(word: str) -> None:
    """A word that is none is no state."""
    assert run_state(run_number(word) or 0) == word
    assert run_number(word.upper()) is None


def test_every_state_of_the_contract_has_a_word() -> None:
    """A state that is not known here is its number."""
    assert {run_state(number) for number in pb.RunState.values()} == {*RUN_STATES, "not loaded"}
    assert {client_state(number) for number in pb.ClientState.values()} == {*CLIENT_STATES, "unknown"}
    assert [client_state(client_number(word)) for word in CLIENT_STATES] == list(CLIENT_STATES)
    assert (run_state(77), client_state(77)) == ("77", "77")


def test_events_that_differ_in_numbers_alone_are_one() -> None:
    """The newest stands for them, the newest first; events of every round are left out."""
    entries = [
        pb.HistoryEntry(number=number, event=event, subject="wards", detail=detail)
        for number, (event, detail) in enumerate([
            ("run_created", "digits"), ("attempt_opened", "round 1"), ("client_failed", "round 1, c: no frame"),
            ("round_committed", "round 1"), ("client_failed", "round 7, c: no frame"),
            ("client_failed", "round 8, d: no frame"),
        ])
    ]  # fmt: skip
    shown = [(entry.number, alike) for entry, alike in words.without_repeats(entries, 10)]
    assert shown == [(5, 0), (4, 1), (0, 0)]
    told = [entry for entry in reversed(entries) if entry.event not in words.ROUTINE]
    assert [(entry.number, alike) for entry, alike in words.folded(told)] == [(5, 0), (4, 1), (0, 0)]
    assert [(entry.number, alike) for entry, alike in words.folded([*told, told[1]])][-1] == (4, 0)
    assert [words.alike_words(number) for number in (0, 1, 2)] == [
        "",
        "; 1 earlier one alike",
        "; 2 earlier ones alike",
    ]


def test_an_operator_reads_words() -> None:
    """A refused update is named so, an id of a process as such, and a coordinator without login has no "anybody"."""
    assert words.event_words("culprit_dropped", "c: norm") == "update refused: c: norm"
    assert words.event_detail("client_registered", "84de249b76624f978d33b639d8c37e9a") == "by its process 84de249b…"
    assert words.event_detail("round_committed", "round 8") == "round 8"
    assert (words.who("anybody"), words.who("operator:alice")) == ("without login", "operator:alice")
