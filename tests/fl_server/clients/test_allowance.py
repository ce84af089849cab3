"""One client's allowance: calls at once, calls a second, fetches of one resource."""

from __future__ import annotations

import pytest

from fl_server.clients.allowance import Allowance
from fl_server.config import TransfersConfig

MIB = 1 << 20
KINDS = ("uploads", "downloads", "queries", "attends")


@pytest.mark.parametrize("kind", KINDS)
def test_so_many_calls_of_a_kind_go_on_at_once(kind):
    """One that is over makes room; other kinds have their own limit."""
    allowance = Allowance(TransfersConfig(**{f"{kind}_at_once": 2}))
    assert [allowance.begin(kind, 0) for _ in range(2)] == [None, None]
    excess = allowance.begin(kind, 0)
    assert (excess.limit, excess.wait_s) == (kind, 1.0)
    assert excess.expected == f"2 {kind} at once (transfers.{kind}_at_once)"
    assert all(allowance.begin(other, 0) is None for other in KINDS if other != kind)
    allowance.end(kind)
    assert allowance.begin(kind, 0) is None


def calls(allowance, now):
    """Calls that are taken before the first that is refused."""
    count = 0
    while allowance.begin("queries", now) is None:
        allowance.end("queries")
        count += 1
    return count


def test_calls_come_at_a_rate_and_new_work_entitles_to_a_burst():
    """Work that was given before entitles to nothing, or a client would attach again and again."""
    allowance = Allowance(TransfersConfig(calls=10, calls_per_s=2))
    assert calls(allowance, now=0) == 10
    assert calls(allowance, now=1) == 2
    for work in ("round 0", "evaluation 0"):
        allowance.given(work)
        assert calls(allowance, now=1) == 10
    allowance.given("round 0")
    allowance.given("evaluation 0")
    assert calls(allowance, now=1) == 0


def fetched(allowance, now, size=4 * MIB):
    """Whole fetches of one resource that are sent before the first that is not."""
    count = 0
    while True:
        fetch = allowance.fetch(b"digest", size)
        if any(fetch.send(MIB, now) for _ in range(size // MIB)):
            return count
        count += 1


def test_a_resource_is_fetched_whole_so_many_times_for_an_assignment():
    """Then once in a while; for the next assignment anew, and another resource has its own count."""
    allowance = Allowance(TransfersConfig(fetches=3, fetch_again_s=30))
    assert fetched(allowance, now=0) == 3
    assert fetched(allowance, now=31) == 1
    allowance.given("round 1")
    assert fetched(allowance, now=31) == 3
    allowance.given("round 1")
    assert fetched(allowance, now=31) == 0
    assert allowance.fetch(b"other", MIB).send(MIB, 31) is None


def test_what_a_cut_fetch_did_not_send_is_not_counted():
    """A download that goes on where it was cut costs what is sent."""
    allowance = Allowance(TransfersConfig(fetches=1, fetch_again_s=30))
    for _ in range(4):
        assert allowance.fetch(b"digest", 4 * MIB).send(MIB, 0) is None
    excess = allowance.fetch(b"digest", 4 * MIB).send(MIB, 0)
    assert (excess.limit, excess.wait_s) == ("fetches", 30)


def test_the_rate_of_bytes_is_unlimited_unless_it_is_set():
    """A pause behind what is more than a second's worth."""
    assert Allowance(TransfersConfig()).pause_s(1 << 40, 0) == 0
    allowance = Allowance(TransfersConfig(bytes_per_s=100))
    assert [allowance.pause_s(100, 0), allowance.pause_s(50, 0)] == [0, pytest.approx(0.5)]


def test_only_so_many_resources_are_remembered():
    """A coordinator that sends out many bundles keeps no line of each for each client."""
    allowance = Allowance(TransfersConfig())
    for number in range(1000):
        allowance.fetch(number.to_bytes(2, "big"), MIB)
    assert len(allowance._fetches) == 64
