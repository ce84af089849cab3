"""Shamir's secret sharing: t of the shares give the secret, fewer give nothing (Shamir 1979, "How to Share a Secret").

The field is that of the prime 2^256 + 297. A secret is 32 bytes, a share the value of a polynomial of degree t - 1 at
the holder's point, 33 bytes. The weights of the interpolation depend on the points alone: one set serves all secrets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SECRET_BYTES = 32
SHARE_BYTES = 33
PRIME = 2**256 + 297
"""The smallest prime over 2^256."""


def shares_of(secret: bytes, coefficients: Sequence[bytes], points: Sequence[int]) -> list[bytes]:
    """The share at each point.

    Args:
        secret: of SECRET_BYTES.
        coefficients: t - 1 random strings of SECRET_BYTES, used for this secret alone.
        points: different numbers over 0, one for each holder.
    """
    descending = [int.from_bytes(number, "big") for number in (*reversed(coefficients), secret)]
    shares = []
    for point in points:
        value = 0
        for number in descending:
            value = (value * point + number) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def weights_at_zero(points: Sequence[int]) -> list[int]:
    """The factor of each share in the secret: prod_{m != j} x_m / (x_m - x_j), with one inversion for all.

    Raises ValueError for points that are not different numbers over 0.
    """
    if len(set(points)) != len(points) or not all(0 < point < PRIME for point in points):
        raise ValueError("expected different points over 0")
    whole = math.prod(points)
    below = [point * math.prod(other - point for other in points if other != point) % PRIME for point in points]
    return [whole * inverse % PRIME for inverse in _inverses(below)]


def recovered(weights: Sequence[int], shares: Sequence[bytes]) -> bytes | None:
    """The secret of t shares, with the weights of their points; None if no secret has such shares."""
    secret = sum(weight * int.from_bytes(share, "big") for weight, share in zip(weights, shares, strict=True)) % PRIME
    return secret.to_bytes(SECRET_BYTES, "big") if secret < 2**256 else None


def _inverses(numbers: Sequence[int]) -> list[int]:
    """Inverses modulo the prime: of the product of all, then one multiplication after the other."""
    products = [1]
    for number in numbers:
        products.append(products[-1] * number % PRIME)
    inverse, made = pow(products[-1], -1, PRIME), list[int]()
    for number, before in zip(reversed(numbers), reversed(products[:-1]), strict=True):
        made.append(inverse * before % PRIME)
        inverse = inverse * number % PRIME
    return made[::-1]
