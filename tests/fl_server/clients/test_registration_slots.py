"""Reserved slots of registrations."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fl_server.clients.registration import BURST_S, KEPT_S, RegistrationLimiter

PER_S = 4.0
"""A quarter of a second for each registration, which is exact; 8 fit into a burst of 2 s."""
BURST = int(BURST_S * PER_S)


def storm(limiter: RegistrationLimiter, count: int, now: float = 100.0, name: str = "c") -> list[float]:
    """The waits of `count` clients that register at one moment."""
    return [limiter.wait(f"{name}{number}", now) for number in range(count)]


def test_a_small_fleet_is_not_delayed() -> None:
    """As many clients as fit into the burst register at one moment."""
    assert storm(RegistrationLimiter(PER_S), BURST) == [0.0] * BURST


def test_further_clients_get_slots() -> None:
    """One interval after the other, so that no two come at once."""
    waits = storm(RegistrationLimiter(PER_S), BURST + 4)[BURST:]
    assert waits == [0.25, 0.5, 0.75, 1.0]
    assert all(later - earlier == 1 / PER_S for earlier, later in pairwise(waits))


def test_a_client_registers_at_its_slot() -> None:
    """A slot was counted when it was reserved: the clients that were sent away do not compete again."""
    limiter = RegistrationLimiter(PER_S)
    late = storm(limiter, 3 * BURST)[BURST:]
    assert [limiter.wait(f"c{BURST + number}", 100.0 + wait) for number, wait in enumerate(late)] == [0.0] * len(late)


def test_an_early_call_keeps_the_slot() -> None:
    """It gains nothing, and takes no other client's slot."""
    limiter = RegistrationLimiter(PER_S)
    storm(limiter, BURST + 1)
    assert limiter.wait(f"c{BURST}", 100.125) == 0.125
    assert limiter.wait("another", 100.125) == 0.375


def test_a_slot_is_used_once() -> None:
    """A client that registers again gets a new slot."""
    limiter = RegistrationLimiter(PER_S)
    storm(limiter, BURST + 1)
    assert [limiter.wait(f"c{BURST}", 100.25) for _ in range(2)] == [0.0, 0.25]


def test_the_burst_is_available_again_later() -> None:
    """After a pause as long as the burst, as many register at once as before, and not more."""
    limiter = RegistrationLimiter(PER_S)
    storm(limiter, BURST)
    assert storm(limiter, BURST + 1, now=200.0) == [0.0] * BURST + [0.25]


def test_unused_slots_expire() -> None:
    """Nothing is kept of them, and their clients get new slots."""
    limiter = RegistrationLimiter(PER_S)
    storm(limiter, BURST + 2)
    assert storm(limiter, 1, now=101.0 + KEPT_S) == [0.0]
    assert limiter._slots == {}


@pytest.mark.parametrize("late", [0.0, KEPT_S - 1], ids=["at its slot", "a little late"])
def test_a_slot_is_kept_for_a_while(late: float) -> None:
    """Other clients do not take it."""
    limiter = RegistrationLimiter(PER_S)
    storm(limiter, BURST + 1)
    storm(limiter, 3 * BURST, now=100.25 + late, name="other")
    assert limiter.wait(f"c{BURST}", 100.25 + late) == 0.0
