"""The privacy accountant: Renyi differential privacy of the Gaussian mechanism on Poisson samples.

One step with the noise multiplier z on a sample of rate q has, at a whole order a, the Renyi divergence

    1 / (a - 1) * log sum_{k = 0..a} C(a, k) (1 - q)^(a - k) q^k exp((k^2 - k) / (2 z^2))

(Mironov, Talwar, Zhang 2019, "Renyi Differential Privacy of the Sampled Gaussian Mechanism", 3.3). Steps of any kind
add up at each order. (a - 1) times the divergence is convex in a, so a line between two whole orders is an upper bound
at the orders between them. The sum is converted by Canonne, Kamath, Steinke 2020, "The Discrete Gaussian for
Differential Privacy", proposition 12:

    epsilon = divergence + log((a - 1) / a) - (log(delta) + log(a)) / (a - 1), the smallest over the orders

A step on a sample of a fixed size, without replacement, of the share q of all, has at a whole order a at most

    1 / (a - 1) * log(1 + C(a, 2) q^2 min(4 (exp(2 / s^2 / 2) - 1), 2 exp(2 / s^2 / 2))
                        + sum_{k = 3..a} 2 C(a, k) q^k exp((k - 1) k / (2 s^2))),        s = z / 2

(Wang, Balle, Kasiviswanathan 2019, "Subsampled Renyi Differential Privacy and Analytical Moments Accountant", theorem
9, for a mechanism without a bound at infinite order). Up to order 64 a term has 4 sqrt(B(k) B(k)) in place of
2 exp(...) where that is less, B(k - 1) and B(k + 1) if k is odd, with the moments of the ratio of densities less 1

    B(l) = sum_{k = 0..l} (-1)^k C(l, k) exp(k (k - 1) / (2 s^2))

(theorem 27). There two data sets are neighbours if one example is replaced by
another: the sum changes by twice the norm of a contribution, so s is half of z.

By the same coupling of samples it is never more than that of the whole data, (a - 1) a / (2 s^2).

Every value is an upper bound. With Poisson samples two data sets are neighbours if one has an example more, or an
example without effect in its place, so steps with samples of both kinds do not add up. Only the standard library is
needed, for a device asks before each assignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

_WHOLE = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)
_BETWEEN = tuple(1 + tenth / 10 for tenth in range(1, 110) if tenth % 10)
ORDERS: tuple[float, ...] = tuple(sorted([*_WHOLE, *_BETWEEN]))
"""The orders at which divergences are added up; each is over 1."""


@dataclass(frozen=True, slots=True, order=True)
class Mechanism:
    """One step of the Gaussian mechanism on a Poisson sample."""

    noise_multiplier: float
    """z, greater than 0: standard deviation of the noise / largest norm of one contribution."""
    rate: float
    """q: the probability of one example or client to be in the sample, over 0 and at most 1."""
    fixed_size: bool = False
    """Whether the sample has a fixed size; else each is drawn by itself."""

    def __post_init__(self) -> None:
        if not 0.0 < self.noise_multiplier < math.inf or not 0.0 < self.rate <= 1.0:
            raise ValueError(f"expected a noise multiplier over 0, and a rate over 0 and at most 1, got {self}")


Spent = Mapping[Mechanism, int]
"""The number of steps of each mechanism."""


def epsilon_of(spent: Spent, delta: float) -> float:
    """The smallest epsilon that is proved for these steps together; 0 for none. delta: over 0, below 1.

    Raises ValueError for steps with two kinds of samples, whose neighbours differ.
    """
    if not 0.0 < delta < 1.0:
        raise ValueError(f"expected delta over 0 and below 1, got {delta}")
    if len({mechanism.fixed_size for mechanism, steps in spent.items() if steps}) > 1:
        raise ValueError("expected samples of one kind, got Poisson samples and samples of a fixed size")
    totals = _total([(mechanism, steps) for mechanism, steps in sorted(spent.items()) if steps])
    if totals is None:
        return 0.0
    return max(0.0, min(_converted(total, order, delta) for order, total in zip(ORDERS, totals, strict=True)))


def _total(counts: Iterable[tuple[Mechanism, int]]) -> Sequence[float] | None:
    """The divergence of all steps at each order; None for no step."""
    totals: list[float] | None = None
    for mechanism, steps in counts:
        added = [steps * one for one in _divergences(mechanism)]
        totals = added if totals is None else [total + more for total, more in zip(totals, added, strict=True)]
    return totals


def _converted(divergence: float, order: float, delta: float) -> float:
    return divergence + math.log1p(-1.0 / order) - (math.log(delta) + math.log(order)) / (order - 1.0)


@lru_cache(maxsize=256)
def _divergences(mechanism: Mechanism) -> tuple[float, ...]:
    """The divergence of one step at each order."""
    moments = {whole: _log_moment(mechanism, whole) for whole in _WHOLE} | {1: 0.0}
    return tuple(_between(moments, order) / (order - 1.0) for order in ORDERS)


def _between(moments: Mapping[int, float], order: float) -> float:
    """(a - 1) times the divergence at an order, or the line between the whole orders around it."""
    below = math.floor(order)
    share = order - below
    return moments[below] if not share else (1.0 - share) * moments[below] + share * moments[below + 1]


def _log_moment(mechanism: Mechanism, order: int) -> float:
    """(a - 1) times the divergence at a whole order a."""
    z, q = mechanism.noise_multiplier, mechanism.rate
    if mechanism.fixed_size:
        return _log_moment_of_fixed_size(z / 2.0, q, order)
    if q == 1.0:
        return order * (order - 1) / (2.0 * z * z)
    terms = [
        math.log(math.comb(order, k)) + (order - k) * math.log1p(-q) + k * math.log(q) + (k * k - k) / (2.0 * z * z)
        for k in range(order + 1)
    ]
    return _log_of_sum(terms)


def _log_moment_of_fixed_size(s: float, q: float, order: int) -> float:
    """The same for a sample of a fixed size."""
    whole = order * (order - 1) / (2.0 * s * s)
    if q == 1.0:
        return whole
    second = 1.0 / (s * s)  # the divergence of the whole mechanism at order 2
    # log(4 (e^x - 1)), without overflow
    pair = min(math.log(4.0) + second + math.log(-math.expm1(-second)), math.log(2.0) + second)
    terms = [0.0, math.log(math.comb(order, 2)) + 2.0 * math.log(q) + pair]
    moments = _log_even_moments(s) if order <= _MOST_MOMENT and s >= _LEAST_NOISE else {}
    for k in range(3, order + 1):
        bound = math.log(2.0) + k * (k - 1) / (2.0 * s * s)
        if moments:
            bound = min(bound, math.log(4.0) + (moments[k - k % 2] + moments[k + k % 2]) / 2.0)
        terms.append(bound + math.log(math.comb(order, k)) + k * math.log(q))
    return min(whole, _log_of_sum(terms))


_MOST_MOMENT, _LEAST_NOISE = 64, 0.1
"""With less noise these moments are no better, and have too many digits."""


@lru_cache(maxsize=256)
def _log_even_moments(s: float) -> Mapping[int, float]:
    """The logarithm of B(l) for each even l up to _MOST_MOMENT, in as many digits as its alternating sum loses."""
    with localcontext() as context:
        context.prec = 40 + int(_MOST_MOMENT * (0.31 + max(0.0, math.log10(s))))
        moments = [(Decimal(k * (k - 1)) / (2 * Decimal(s) ** 2)).exp() for k in range(_MOST_MOMENT + 1)]
        even = range(2, _MOST_MOMENT + 1, 2)
        sums = {of: sum(math.comb(of, k) * (-1) ** k * moments[k] for k in range(of + 1)) for of in even}
        return {of: float(Decimal(total).ln()) for of, total in sums.items()}


def _log_of_sum(logs: Sequence[float]) -> float:
    """log sum exp."""
    most = max(logs)
    return most + math.log(math.fsum(math.exp(log - most) for log in logs))
