"""Shares of a secret: any t give it, fewer tell nothing, and another implementation reads and writes the same."""

from __future__ import annotations

import hashlib
import random
from itertools import combinations

import pytest
import shamirs

from fl_common.secure_aggregation.shamir import PRIME, recovered, shares_of, weights_at_zero

SECRET = hashlib.sha256(b"secret").digest()


@pytest.mark.parametrize("seed", range(20))
def test_another_implementation_reads_and_writes_the_same_shares(seed: int) -> None:
    """shamirs opens our shares, and we open its: 2 to 25 holders, any threshold."""
    draw = random.Random(seed)
    holders = draw.randint(2, 25)
    threshold, secret = draw.randint(2, holders), draw.randbytes(32)
    number = int.from_bytes(secret, "big")
    theirs = draw.sample([*shamirs.shares(number, holders, PRIME, threshold)], threshold)
    weights = weights_at_zero([share.index for share in theirs])
    assert recovered(weights, [share.value.to_bytes(33, "big") for share in theirs]) == secret
    points = range(1, holders + 1)
    ours = shares_of(secret, [draw.randbytes(32) for _ in range(threshold - 1)], points)
    given = zip(points, ours, strict=True)
    same = [shamirs.share(point, int.from_bytes(share, "big"), PRIME) for point, share in given]
    assert shamirs.interpolate(draw.sample(same, threshold), threshold=threshold) == number


def test_any_threshold_of_the_shares_give_the_secret() -> None:
    """They are values of the polynomial, which is checked against its definition."""
    draw = random.Random(0)
    coefficients, points = [draw.randbytes(32) for _ in range(3)], [1, 2, 5, 8, 13, 400]
    shares = dict(zip(points, shares_of(SECRET, coefficients, points), strict=True))
    numbers = [int.from_bytes(part, "big") for part in (SECRET, *coefficients)]
    for point, share in shares.items():
        assert int.from_bytes(share, "big") == sum(part * point**power for power, part in enumerate(numbers)) % PRIME
    for chosen in combinations(points, 4):
        assert recovered(weights_at_zero(chosen), [shares[point] for point in chosen]) == SECRET


def test_fewer_shares_fit_every_secret() -> None:
    """With one share less than the threshold there is a polynomial for each other secret, too."""
    shares = shares_of(SECRET, [bytes(range(32)), bytes(32)], [1, 2])
    for other in (0, 1, 2**256 - 1):
        third = sum(
            weight * value
            for weight, value in zip(
                _weights_at(3, [0, 1, 2]), [other, *(int.from_bytes(share, "big") for share in shares)], strict=True
            )
        )
        whole = [*shares, (third % PRIME).to_bytes(33, "big")]
        assert recovered(weights_at_zero([1, 2, 3]), whole) == other.to_bytes(32, "big")


def _weights_at(place: int, points: list[int]) -> list[int]:
    """Lagrange's factors at a place, by their definition."""
    factors = []
    for point in points:
        factor = 1
        for other in points:
            if other != point:
                factor = factor * (place - other) * pow(point - other, -1, PRIME) % PRIME
        factors.append(factor)
    return factors


def test_wrong_shares_give_another_secret_or_none() -> None:
    """A sum over 2^256 is no secret."""
    shares = shares_of(SECRET, [bytes(32)], [1, 2])
    assert recovered(weights_at_zero([1, 2]), [shares[0], bytes(33)]) != SECRET
    beyond = (PRIME - 1).to_bytes(33, "big")
    assert recovered([1], [beyond]) is None


@pytest.mark.parametrize("points", [[1, 1], [0, 1], [-1, 1], [PRIME]], ids=str)
def test_points_that_are_no_points(points: list[int]) -> None:
    """Two equal ones divide by zero; at 0 lies the secret."""
    with pytest.raises(ValueError, match="different points over 0"):
        weights_at_zero(points)


def test_the_modulus_is_the_first_prime_above_the_secrets() -> None:
    """Fermat's test with several bases; each smaller number over 2^256 fails it."""

    def passes(number: int) -> bool:
        return all(pow(base, number - 1, number) == 1 for base in (2, 3, 5, 7, 11, 13))

    assert [number for number in range(2**256 + 1, PRIME + 1, 2) if passes(number)] == [PRIME]
