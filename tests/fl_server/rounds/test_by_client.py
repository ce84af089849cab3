"""The sequence of admitted updates."""

from __future__ import annotations

import pytest

from fl_server.rounds.by_client import Arrivals


def test_it_is_the_tuple_of_its_entries() -> None:
    """In order of arrival, with its places and slices, as equal and with the same hash."""
    arrivals = Arrivals().added("b", b"B").added("a", b"A").added("c", b"C")
    entries = (("b", b"B"), ("a", b"A"), ("c", b"C"))
    assert arrivals == entries
    assert entries == arrivals
    assert hash(arrivals) == hash(entries)
    assert (len(arrivals), arrivals[0], arrivals[-1], arrivals[:2]) == (3, entries[0], entries[2], entries[:2])
    assert (tuple(arrivals), repr(arrivals), bool(Arrivals())) == (entries, repr(entries), False)
    assert (arrivals.has("a"), arrivals.has("d"), list(arrivals.clients(1))) == (True, False, ["a", "c"])


def test_earlier_values_do_not_change() -> None:
    """Two values that grew from the same one know nothing of each other."""
    start = Arrivals((("a", b"A"),))
    one, other = start.added("b", b"B"), start.added("c", b"C")
    assert [tuple(each) for each in (start, one, other)] == [
        (("a", b"A"),),
        (("a", b"A"), ("b", b"B")),
        (("a", b"A"), ("c", b"C")),
    ]
    assert (start.has("b"), one.has("c"), other.has("b")) == (False, False, False)
    assert one.added("c", b"D") == (("a", b"A"), ("b", b"B"), ("c", b"D"))


def test_each_client_comes_once() -> None:
    """Also when it is given twice from the start."""
    with pytest.raises(ValueError, match="without an update, got a"):
        Arrivals((("a", b"A"),)).added("a", b"B")
    with pytest.raises(ValueError, match="one update of each client"):
        Arrivals((("a", b"A"), ("a", b"B")))
    with pytest.raises(IndexError):
        Arrivals()[0]
