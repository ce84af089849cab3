"""Words and facts that every surface shows."""

from __future__ import annotations

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

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
