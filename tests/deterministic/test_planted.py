"""The simulation finds faults that are planted into the core and its driver."""

from __future__ import annotations

import pytest

from tests.deterministic.core_life import live_core
from tests.deterministic.planted import FOUND_BY, PLANTED, planted

SEEDS = 1000


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str) -> None:
    """Each planted fault violates an invariant within a thousand lives of depth 1. The known seed is tried first."""
    with planted(fault):
        assert any(live_core(seed)[0] for seed in (FOUND_BY.get(fault, 0), *range(SEEDS)))


def test_lives_of_the_core_keep_every_invariant() -> None:
    """Without a planted fault no life violates one, and every run is over soon after the faults."""
    assert [(seed, found) for seed in range(2000) if (found := live_core(seed)[0])] == []
