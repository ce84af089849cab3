"""A fleet that comes at once is let in at a pace."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fl_server.door import BURST_S, KEPT_S, Door

PER_S = 4.0
"""A quarter of a second for each, which is exact; 8 fit into a burst of 2 s."""
BURST = int(BURST_S * PER_S)


def storm(door, count, now=100.0, name="c"):
    """The waits of so many clients that come at one moment."""
    return [door.wait(f"{name}{number}", now) for number in range(count)]


def test_a_small_fleet_never_sees_the_door():
    """As many as fit into the burst come in at one moment."""
    assert storm(Door(PER_S), BURST) == [0.0] * BURST


def test_the_others_get_times_of_their_own():
    """One step after the other, so that no two come at once."""
    waits = storm(Door(PER_S), BURST + 4)[BURST:]
    assert waits == [0.25, 0.5, 0.75, 1.0]
    assert all(later - earlier == 1 / PER_S for earlier, later in pairwise(waits))


def test_who_comes_at_its_time_is_in():
    """Its place was counted when it was given: the storm of those who were sent away does not begin anew."""
    door = Door(PER_S)
    late = storm(door, 3 * BURST)[BURST:]
    assert [door.wait(f"c{BURST + number}", 100.0 + wait) for number, wait in enumerate(late)] == [0.0] * len(late)


def test_who_comes_too_early_keeps_its_time():
    """Asking again gains nothing, and costs nobody else a place."""
    door = Door(PER_S)
    storm(door, BURST + 1)
    assert door.wait(f"c{BURST}", 100.125) == 0.125
    assert door.wait("another", 100.125) == 0.375


def test_a_time_is_good_for_once():
    """Who came in at its time, and comes again, stands in line like everybody."""
    door = Door(PER_S)
    storm(door, BURST + 1)
    assert [door.wait(f"c{BURST}", 100.25) for _ in range(2)] == [0.0, 0.25]


def test_the_pace_is_free_again_later():
    """After a silence as long as the burst, as many come in at once as before, and not more."""
    door = Door(PER_S)
    storm(door, BURST)
    assert storm(door, BURST + 1, now=200.0) == [0.0] * BURST + [0.25]


def test_who_does_not_come_leaves_nothing_behind():
    """Times that were not used are forgotten, and their clients stand in line like everybody."""
    door = Door(PER_S)
    storm(door, BURST + 2)
    assert storm(door, 1, now=101.0 + KEPT_S) == [0.0]
    assert door._times == {}


@pytest.mark.parametrize("late", [0.0, KEPT_S - 1], ids=["at its time", "a little late"])
def test_a_time_that_was_given_holds_for_a_while(late):
    """Others that come meanwhile do not take it."""
    door = Door(PER_S)
    storm(door, BURST + 1)
    storm(door, 3 * BURST, now=100.25 + late, name="other")
    assert door.wait(f"c{BURST}", 100.25 + late) == 0.0
