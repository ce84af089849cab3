"""Random numbers that are hashes of names: the same on every machine, in any order of drawing."""

from __future__ import annotations

import math
from statistics import NormalDist

from fl_server.rounds.sampling import ticket

_TICKETS = 1 << 64
_NORMAL = NormalDist()


def draw_share(kind: str, *parts: object) -> float:
    """A number between 0 and 1, uniform over the parts; the 53 bits of a float64 of it are random."""
    return ((ticket(kind, *parts) >> 12) + 0.5) / (_TICKETS >> 12)


def draw_lognormal(median: float, sigma: float, share: float) -> float:
    """The quantile of a lognormal distribution at a share between 0 and 1."""
    return median * math.exp(sigma * _NORMAL.inv_cdf(share))


def draw_exponential(mean: float, share: float) -> float:
    """The quantile of an exponential distribution at a share between 0 and 1."""
    return -mean * math.log1p(-share)
