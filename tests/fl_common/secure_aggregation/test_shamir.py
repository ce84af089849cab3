"""Shares of a secret: any t give it, fewer tell nothing, and another implementation reads and writes the same."""

from __future__ import annotations

import hashlib
import random
from itertools import combinations

import pytest

from fl_common.secure_aggregation.shamir import PRIME, recovered, shares_of, weights_at_zero

SECRET = hashlib.sha256(b"secret").digest()
OF_SHAMIRS = {
    1: "0082da03ae0aea023b9862cb31e224885f02226c0fe17f746ccf7e43f2478d2cd8",
    2: "008340dbe5a567f1e3c74fbc8d0f0556eb4f42b45b090f7083ba09bbebb442c556",
    3: "002cec95fa4a9772dc1899d7733127c22ba541c3aee812f33b620251683b486bd5",
    4: "007fdd31ebfa7885248c411be4488bca20041f9a0b7e89fc93c7680467dc9e217e",
    5: "007c12afbab50b28bd224589e055316ec86bdc3770cc748c8cea3ad4ea9843e528",
}
"""Point -> share of SECRET with the threshold 3; made by shamirs 4.0.0 on 2026-11-28."""


@pytest.mark.parametrize("points", list(combinations(OF_SHAMIRS, 3)), ids=str)
def test_shares_of_another_implementation_give_the_secret(points: tuple[int, ...]) -> None:
    """Any three of them."""
    shares = [bytes.fromhex(OF_SHAMIRS[point]) for point in points]
    assert recovered(weights_at_zero(points), shares) == SECRET


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
