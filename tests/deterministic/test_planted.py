"""The simulation finds faults that are planted into the core and its driver."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.deterministic.core_life import CoreLife, live_core
from tests.deterministic.planted import FOUND_BY, PLANTED, planted
from tests.deterministic.replacing import replaced

SEEDS = 1000


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str) -> None:
    """Each planted fault violates an invariant within a thousand lives of depth 1. The known seed is tried first."""
    with planted(fault):
        assert any(live_core(seed)[0] for seed in (FOUND_BY.get(fault, 0), *range(SEEDS)))


def test_lives_of_the_core_keep_every_invariant() -> None:
    """Without a planted fault no life violates one, and every run is over soon after the faults."""
    assert [(seed, found) for seed in range(2000) if (found := live_core(seed)[0])] == []


@pytest.mark.parametrize("changes", [{}, {"round": 3, "admitted": (("a", b"1"),)}])
def test_a_state_is_replaced_as_dataclasses_do_it(changes: dict[str, Any]) -> None:
    """The faster function of the simulation makes the same value, also where the class converts a field."""
    state = CoreLife(0).driver.state
    assert replaced(state, **changes) == replace(state, **changes)
    assert type(replaced(state, **changes).admitted) is type(state.admitted)
