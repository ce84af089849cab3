"""Leaders that were replaced and run on change nothing, and the checks find each way in which they could."""

from __future__ import annotations

import pytest

from tests.deterministic.core_objects import ObjectRules
from tests.deterministic.replaced_life import Rules, live_replaced

SEEDS, MANY = 100, 10_000
PLANTED = {
    "no write checks the epoch": Rules(checks=False),
    "a takeover keeps the epoch": Rules(counts=False),
    "the epoch is checked before the transaction": Rules(in_transaction=False),
    "leaders give objects the same keys": Rules(objects=ObjectRules(own_keys=False)),
    "a row is written before its object": Rules(objects=ObjectRules(object_first=False)),
    "objects are removed before their removal is written": Rules(objects=ObjectRules(removal_first=False)),
}


@pytest.mark.parametrize("seeds", [range(SEEDS), pytest.param(range(SEEDS, MANY), marks=pytest.mark.slow)])
def test_former_leaders_change_nothing(seeds: range) -> None:
    """Every life keeps the invariants of the core, and there are more former leaders than lives."""
    lives = [(seed, *live_replaced(seed)[:2]) for seed in seeds]
    assert [(seed, found) for seed, found, _ in lives if found] == []
    assert sum(replaced for _, _, replaced in lives) > len(seeds)


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str) -> None:
    """A former leader that writes is found within the same lives."""
    assert any(live_replaced(seed, PLANTED[fault])[0] for seed in range(SEEDS))


def test_a_standby_that_does_not_wait_for_the_lease_does_no_harm() -> None:
    """The lease decides when a standby may lead. What is protected is protected by the epoch alone."""
    assert [(seed, found) for seed in range(SEEDS) if (found := live_replaced(seed, Rules(waits=False))[0])] == []
