"""The simulation finds faults that are planted into the core and its driver."""

from __future__ import annotations

import pytest

from tests.deterministic.core_life import live_core
from tests.deterministic.first_seeds import PLANTED
from tests.deterministic.planted import planted

SEEDS = 1000

LIVES = 2000


@pytest.mark.parametrize(("fault", "check", "seed"), [(fault, *by) for fault, by in PLANTED[1].items()])
def test_a_planted_fault_is_found(fault: str, check: str, seed: int) -> None:
    """Its check finds each planted fault within a thousand lives of depth 1. The known seed is tried first."""
    with planted(fault):
        assert any(live_core(each)[0].startswith(f"{check}:") for each in (seed, *range(SEEDS)))


def test_a_run_that_is_extended_in_its_last_evaluation_and_killed_goes_on() -> None:
    """A restart does not wait for the evaluation of a round that is not the last any more: seed 2006960 had this."""
    assert live_core(2006960)[0] == ""


@pytest.mark.parametrize("seed", [2025300, 2044287, 2044401])
def test_lives_that_had_shown_a_fault_of_a_check(seed: int) -> None:
    """Half of the first cohort's goal is a quorum, and a redrawn round counts the processes of a daemon anew."""
    assert live_core(seed)[0] == ""


@pytest.mark.parametrize("seed", [2502818, 2510781])
def test_an_exchange_that_reopens_after_a_restart_keeps_the_places_of_all_its_clients(seed: int) -> None:
    """One update of the list was dropped, and a replacement took the place of a client that could still deliver."""
    assert live_core(seed)[0] == ""


@pytest.mark.parametrize("seed", [3306244, 3496830])
def test_a_client_that_is_drawn_again_for_a_version_has_the_processes_of_before(seed: int) -> None:
    """A restart in a step of a buffer had forgotten them, because the work seemed too stale then."""
    assert live_core(seed)[0] == ""


def test_lives_of_the_core_keep_every_invariant() -> None:
    """Without a planted fault no life of two thousand violates one, and every run is over soon after the faults.

    These lives include the first that finds each planted fault.
    """
    assert max(seed for _, seed in PLANTED[1].values()) < LIVES
    assert violations(range(LIVES)) == []


def violations(seeds: range) -> list[tuple[int, str]]:
    """What is violated in which life."""
    return [(seed, found) for seed in seeds if (found := live_core(seed)[0])]
