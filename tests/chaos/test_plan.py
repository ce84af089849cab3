"""Plans come from their seeds alone, and leave nothing out."""

from __future__ import annotations

import pytest

from tests.chaos.plan import FAULTS, MOST, plan
from tests.chaos.points import AT_THE_END, EVERY_ROUND, NEW_EPOCH, points


@pytest.fixture(scope="module")
def plans():
    """As many seeds in a row as there are faults."""
    return [plan(seed) for seed in range(17, 17 + len(FAULTS))]


def test_a_seed_has_one_plan(plans):
    """Made again it is equal, parameter for parameter; other seeds have others."""
    assert plans == [plan(each.seed) for each in plans]
    assert len(set(map(str, plans))) == len(plans)


def test_a_row_of_seeds_has_every_fault(plans):
    """Each fault under the name that it is counted under, one to four in a seed."""
    assert {fault.name for each in plans for fault in each.faults} == FAULTS.keys()
    assert {len(each.faults) for each in plans} == set(range(1, MOST + 1))


def test_every_point_has_its_death():
    """More than the twelve that a round must survive."""
    names = points(*EVERY_ROUND, *AT_THE_END, *NEW_EPOCH)
    assert all(any(name.endswith(f"death {point}") for name in FAULTS) for point in names)
    assert len(points(*EVERY_ROUND)) > 12


def test_a_plan_is_one_line(plans):
    """With job, rounds, and every fault's parameters."""
    assert all("\n" not in str(each) and str(each).startswith(each.job.name) for each in plans)


def test_states_are_lost_where_there_are_some(plans):
    """What breaks a client state happens to a job that keeps them."""
    losing = [each for each in plans if any(fault.name.startswith("lost state") for fault in each.faults)]
    assert losing
    assert all(each.job.keeps_states for each in losing)
