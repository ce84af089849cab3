"""The roster: who is present, suspect or lost, with time as an argument."""

from __future__ import annotations

import pytest

from fl_server.clients.attendance import Presence, Roster


@pytest.fixture
def roster() -> Roster:
    """A grace of 10 seconds; b and a attached at 0."""
    roster = Roster(reattach_grace_s=10)
    roster.attached("b", now=0)
    roster.attached("a", now=0)
    return roster


def test_attached_clients_are_present_in_the_order_of_id_bytes(roster: Roster) -> None:
    """The order is that of the bytes, whatever the order of arrival."""
    roster.attached("Z", now=1)
    assert roster.present() == ("Z", "a", "b")


def test_a_suspect_may_still_be_drawn(roster: Roster) -> None:
    """A lost stream changes the client's state, but not the list of present clients."""
    roster.stream_lost("a", now=5)
    assert (roster.state_of("a"), roster.present()) == (Presence.SUSPECT, ("a", "b"))


def test_a_suspect_is_lost_when_its_grace_is_over(roster: Roster) -> None:
    """Away since 5 with 10 seconds of grace: not lost before 15, and reported once."""
    roster.stream_lost("a", now=5)
    assert [roster.tick(14.9), roster.tick(15), roster.tick(16)] == [(), ("a",), ()]
    assert (roster.state_of("a"), roster.present()) == (Presence.LOST, ("b",))


def test_clients_lost_together_are_reported_in_order(roster: Roster) -> None:
    """One tick returns all, in the order of id bytes."""
    roster.stream_lost("b", now=1)
    roster.stream_lost("a", now=2)
    assert roster.tick(30) == ("a", "b")


def test_a_client_that_returns_within_the_grace_is_not_lost(roster: Roster) -> None:
    """Attaching ends the suspicion, and the next lost stream starts a new grace."""
    roster.stream_lost("a", now=5)
    roster.attached("a", now=14)
    roster.stream_lost("a", now=20)
    assert [roster.tick(29), roster.tick(30)] == [(), ("a",)]


def test_a_lost_client_can_return(roster: Roster) -> None:
    """It is present after it attaches."""
    roster.stream_lost("a", now=0)
    roster.tick(10)
    roster.attached("a", now=99)
    assert (roster.state_of("a"), roster.present()) == (Presence.PRESENT, ("a", "b"))


def test_a_second_lost_stream_does_not_prolong_the_grace(roster: Roster) -> None:
    """An older stream that ends late is no news about a suspect."""
    roster.stream_lost("a", now=0)
    roster.stream_lost("a", now=9)
    assert roster.tick(10) == ("a",)


@pytest.mark.parametrize("before", ["never seen", "forgotten", "lost"])
def test_the_end_of_a_stream_makes_no_client_present(roster: Roster, before: str) -> None:
    """Only a present client becomes suspect."""
    client = {"never seen": "x", "forgotten": "a", "lost": "b"}[before]
    roster.forget("a")
    roster.stream_lost("b", now=0)
    roster.tick(10)
    state = roster.state_of(client)
    roster.stream_lost(client, now=20)
    assert (roster.state_of(client), roster.next_tick(20)) == (state, None)


def test_next_tick_is_the_time_to_the_first_loss(roster: Roster) -> None:
    """None without suspects; otherwise the seconds to the earliest end of a grace, never below 0."""
    assert roster.next_tick(0) is None
    roster.stream_lost("a", now=5)
    roster.stream_lost("b", now=7)
    assert [roster.next_tick(8), roster.next_tick(15), roster.next_tick(40)] == [7, 0, 0]
    roster.tick(15)
    assert roster.next_tick(15) == 2


def test_a_forgotten_client_is_not_expected(roster: Roster) -> None:
    """Neither present nor suspect nor lost; forgetting an unknown one is no error."""
    roster.stream_lost("a", now=0)
    roster.forget("a")
    roster.forget("x")
    assert (roster.state_of("a"), roster.present(), roster.next_tick(0)) == (None, ("b",), None)


def test_a_new_roster_is_settled() -> None:
    """A first start expects no clients."""
    assert Roster(10).settled


def test_a_restart_is_settled_when_all_clients_are_back() -> None:
    """Expected clients are present at once as suspects; the roster settles with the last one that attaches."""
    roster = Roster(10)
    roster.expect(("b", "a"), now=0)
    assert (roster.present(), roster.state_of("a"), roster.settled) == (("a", "b"), Presence.SUSPECT, False)
    roster.attached("a", now=1)
    assert not roster.settled
    roster.attached("b", now=2)
    assert roster.settled


@pytest.mark.parametrize("gone", ["lost", "forgotten"])
def test_a_restart_is_settled_when_missing_clients_are_lost(gone: str) -> None:
    """A client that does not return is lost after the grace, or forgotten."""
    roster = Roster(10)
    roster.expect(("a", "b"), now=0)
    roster.attached("a", now=1)
    if gone == "lost":
        assert roster.tick(10) == ("b",)
    else:
        roster.forget("b")
    assert (roster.settled, roster.present()) == (True, ("a",))


def test_a_later_lost_stream_does_not_unsettle() -> None:
    """An expected client that was back and lost its stream again leaves the roster settled."""
    roster = Roster(10)
    roster.expect(("a",), now=0)
    roster.attached("a", now=1)
    roster.stream_lost("a", now=2)
    assert roster.settled


def test_expecting_a_present_client_changes_nothing(roster: Roster) -> None:
    """A client may return before the expected clients are read from the store."""
    roster.expect(("a",), now=0)
    assert (roster.state_of("a"), roster.settled) == (Presence.PRESENT, True)


@pytest.mark.parametrize("grace", [-1.0, float("nan")])
def test_an_invalid_grace_is_refused(grace: float) -> None:
    """The error has the expected and the given value."""
    with pytest.raises(ValueError, match="expected a reattach_grace_s of 0 or more seconds, got"):
        Roster(grace)
