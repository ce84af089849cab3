"""Errors of the task's code: which ones fail the run, whatever the order of arrival."""

from __future__ import annotations

from itertools import permutations

import pytest

from fl_server.rounds.events import DeadlinePassed, Event, ResumeRequested, RosterChanged, UpdateAdmitted, WorkFailed
from fl_server.rounds.state import Phase
from tests.fl_server.round_play import arrive, collecting, leave, play


def broken(clients: str, cause: str = "KeyError (x.py, line 3)") -> list[Event]:
    """A failure of each of these clients with one cause."""
    return [WorkFailed(client, f"it broke on {client}", cause) for client in clients]


@pytest.mark.parametrize(
    ("events", "quorum", "fails"),
    [
        (broken("abc"), 1, True),
        ([*broken("ab"), *arrive("c")], 2, True),
        ([*broken("abc"), *arrive("d")], 3, True),
        ([*broken("ab"), *broken("c", "TypeError (x.py, line 9)"), *arrive("d")], 3, True),
        ([*broken("ab"), *arrive("cd")], 3, False),
        ([*broken("a"), *leave("b")], 1, False),
        ([*broken("abc"), *arrive("d")], 1, False),
        ([*broken("a"), *broken("b", "another")], 1, False),
        (leave("abcd"), 1, False),
    ],
    ids=["all", "two-of-three", "quorum-missed", "most-common", "more-deliver", "one", "quorum", "causes", "others"],
)
def test_a_run_fails_if_most_clients_fail_on_one_line(events: list[Event], quorum: int, fails: bool) -> None:
    """The last event decides, in any order: enough clients with one cause, more than delivered, and no quorum."""
    came = {event.updates[0][0] if isinstance(event, UpdateAdmitted) else event.client for event in events}  # type: ignore[union-attr]  # all have one
    clients = "".join(sorted(came))
    for ordered in list(permutations(events))[:24]:
        state, _ = play(collecting(clients, quorum=quorum), *ordered)
        assert (state.phase is Phase.ENDED) == fails
        if fails:
            assert state.ending is not None
            assert state.ending[0] == "failed"
            assert "first a: it broke on a" in state.ending[1]


def test_two_clients_fail_no_run_while_others_can_be_drawn() -> None:
    """A third one with the same cause does."""
    state, _ = play(collecting("abcd", clients_per_round=2), RosterChanged(tuple("abcd"), settled=True))
    first = sorted(state.drawn)
    state, _ = play(state, *broken("".join(first)))
    assert state.phase is Phase.COLLECTING
    state, _ = play(state, *broken(min(set("abcd") - set(first))))
    assert state.phase is Phase.COLLECTING  # the fourth one still works
    state, _ = play(state, DeadlinePassed())
    assert state.ending is not None
    assert state.ending[1].startswith("3 clients failed in round 0 with the same error in the task's code, and 0")


def test_a_resumed_run_begins_to_count_anew() -> None:
    """One failure after the repair does not fail it again."""
    state, _ = play(collecting("abc"), *broken("abc"), ResumeRequested())
    assert (state.phase, state.failed) == (Phase.COLLECTING, {})
    state, _ = play(state, *broken("a"), *leave("bc"))
    assert state.phase is Phase.SELECTING
