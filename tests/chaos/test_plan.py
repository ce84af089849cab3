"""A plan depends only on its seed, and consecutive seeds contain every fault."""

from __future__ import annotations

import pytest

from tests.chaos.plan import FAULTS, MAX_FAULTS, Plan, plan
from tests.chaos.points import AT_THE_END, EVERY_ROUND, NEW_EPOCH, points


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """The plans of as many consecutive seeds as there are faults."""
    return [plan(seed) for seed in range(17, 17 + len(FAULTS))]


def test_a_seed_has_one_plan(plans: list[Plan]) -> None:
    """A second plan of the seed has equal parameters. Other seeds have other plans."""
    assert plans == [plan(each.seed) for each in plans]
    assert len(set(map(str, plans))) == len(plans)


def test_consecutive_seeds_contain_every_fault(plans: list[Plan]) -> None:
    """Each fault has the name under which it is counted. A seed has one to four."""
    assert {fault.name for each in plans for fault in each.faults} == FAULTS.keys()
    assert {len(each.faults) for each in plans} == set(range(1, MAX_FAULTS + 1))


def test_the_coordinator_can_die_at_every_point() -> None:
    """A round has more than twelve such points."""
    names = points(*EVERY_ROUND, *AT_THE_END, *NEW_EPOCH)
    assert all(any(name.endswith(f"death {point}") for name in FAULTS) for point in names)
    assert len(points(*EVERY_ROUND)) > 12


def test_a_plan_is_one_line(plans: list[Plan]) -> None:
    """It contains job, rounds and every fault's parameters."""
    assert all("\n" not in str(each) and str(each).startswith(each.job.name) for each in plans)


def test_only_jobs_with_client_states_lose_them(plans: list[Plan]) -> None:
    """Faults that lose a client state are drawn only for a job that keeps client states."""
    losing = [each for each in plans if any(fault.name.startswith("lost state") for fault in each.faults)]
    assert losing
    assert all(each.job.keeps_states for each in losing)
