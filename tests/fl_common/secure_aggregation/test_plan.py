"""Neighbours and thresholds: within their bounds, and with the probabilities that are promised."""

from __future__ import annotations

import random
from fractions import Fraction
from math import comb

import pytest

from fl_common.secure_aggregation.errors import PlanError
from fl_common.secure_aggregation.graph import neighbours_of
from fl_common.secure_aggregation.plan import Plan, plan_of
from fl_common.secure_aggregation.terms import Settings, value_bits_for

SIZES = [3, 4, 5, 7, 10, 20, 21, 30, 60, 100, 333, 1000]


@pytest.mark.parametrize("members", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.33])
def test_bounds(members: int, share: float) -> None:
    """A threshold is over two thirds of the holders and over the corrupt ones, and can be reached."""
    plan = plan_of(Settings(max_corrupt=share), members)
    holders = plan.neighbours + 1
    assert 2 * holders / 3 < plan.threshold <= holders
    assert plan.threshold >= 2 * plan.neighbours / 3 + 1
    assert not plan.full or plan.threshold > int(share * members)
    assert 2 * plan.quorum - members > int(share * members)  # two lists would need a common honest signer
    assert plan.full or (plan.neighbours % 2 == 0 and members > 20)


@pytest.mark.slow
def test_the_bounds_of_every_size() -> None:
    """Up to the largest cohort of a run."""
    for members in range(3, 501):
        plan = plan_of(Settings(), members)
        assert 2 * plan.neighbours / 3 + 1 <= plan.threshold <= plan.neighbours + 1, members
        assert 2 * plan.quorum - members > members // 10, members


def chance(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """The probability that at least so many of the drawn are marked, exactly."""
    ways = sum(comb(marked, k) * comb(population - marked, drawn - k) for k in range(max(least, 0), drawn + 1))
    return Fraction(ways, comb(population, drawn))


@pytest.mark.parametrize("members", [21, 40, 100, 1000])
def test_the_plan_has_the_promised_probabilities(members: int) -> None:
    """Computed exactly here; the plan with two neighbours less does not have them."""
    settings = Settings(max_corrupt=0.1, max_dropped=0.1)
    plan = plan_of(settings, members)

    def fails(neighbours: int, threshold: int) -> Fraction:
        half, tenth = neighbours // 2, members // 10
        return members * max(
            chance(members - 1, tenth, neighbours, threshold),
            chance(members - 1, tenth, half, threshold - half - 1),
            chance(members - 1, tenth, neighbours, neighbours - threshold + 1),
        )

    most = Fraction(1, 2**40)
    assert fails(plan.neighbours, plan.threshold) <= most
    smaller = plan.neighbours - 2
    assert all(fails(smaller, threshold) > most for threshold in range(2 * (smaller + 1) // 3 + 1, smaller + 1))


def test_too_few_members() -> None:
    """The run's floor, and the least floor that there is."""
    with pytest.raises(PlanError, match="at least 5 clients, got 4"):
        plan_of(Settings(min_clients=5), 4)
    with pytest.raises(ValueError, match="min_clients: expected 3"):
        Settings(min_clients=2)


@pytest.mark.parametrize("name", ["max_corrupt", "max_dropped"])
def test_shares_from_a_third_on_are_refused(name: str) -> None:
    """Two thirds could not be honest and there."""
    with pytest.raises(ValueError, match=f"{name}: expected a share"):
        Settings(**{name: 0.34})  # type: ignore[arg-type]


@pytest.mark.parametrize("members", [21, 40, 99])
def test_the_circle(members: int) -> None:
    """Everybody has k neighbours, which have it as a neighbour, and all are connected; a seed decides."""
    plan = plan_of(Settings(), members)
    near = neighbours_of(plan, b"seed")
    assert {len(of_one) for of_one in near} == {plan.neighbours}
    assert all(one in near[other] for one in range(members) for other in near[one])
    assert near == neighbours_of(plan, b"seed") != neighbours_of(plan, b"another")


def test_the_order_of_the_circle_is_uniform() -> None:
    """Each member is a neighbour of the first one as often, over many seeds."""
    plan, draw = Plan(21, 2, 2, 15, 15), random.Random(1)
    counts = [0] * plan.members
    for _ in range(4000):
        for other in neighbours_of(plan, draw.randbytes(32))[0]:
            counts[other] += 1
    assert counts[0] == 0
    assert all(300 < count < 500 for count in counts[1:])  # 400 in the mean, with a deviation of 19


@pytest.mark.parametrize(
    ("bits", "clients", "modulus"), [(8, 1, 8), (8, 2, 16), (16, 3, 24), (16, 256, 24), (16, 257, 32), (24, 10, 32)]
)
def test_the_modulus_holds_every_sum(bits: int, clients: int, modulus: int) -> None:
    """It has whole bytes, and at least b + log2 n bits."""
    assert value_bits_for(bits, clients) == modulus
    assert clients * 2 ** (bits - 1) <= 2 ** (modulus - 1)
