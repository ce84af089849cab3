"""What a coordinator tells Prometheus, read by a benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

Buckets = Mapping[float, float]
"""A histogram: observations so far that were at most so large, by the bound; math.inf has all."""


class Quantile(NamedTuple):
    """Where a share of the observations lies below."""

    value: float
    """As Prometheus reckons: the bucket's observations spread evenly in it."""
    bound: float
    """The upper bound of the bucket that it lies in: this is sure."""


def histogram(address: str, name: str) -> Buckets:
    """A histogram without labels, from the metrics page at host:port."""
    with urlopen(f"http://{address}/metrics", timeout=20) as page:
        families = text_string_to_metric_families(page.read().decode())
        samples = [each for family in families for each in family.samples if each.name == f"{name}_bucket"]
    return {float(sample.labels["le"]): sample.value for sample in samples}


def quantile(before: Buckets, after: Buckets, share: float) -> Quantile:
    """Of what was observed between two looks. Raises ValueError if that is nothing."""
    counts = {bound: after[bound] - before[bound] for bound in sorted(after)}
    wanted = share * counts[math.inf]
    if not wanted:
        raise ValueError("expected observations between the two looks, and there are none")
    lower, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= wanted:
            inside = 1.0 if math.isinf(bound) else (wanted - below) / (count - below)
            return Quantile(lower if math.isinf(bound) else lower + inside * (bound - lower), bound)
        lower, below = bound, count
    raise ValueError(f"expected a histogram with all observations under +Inf, got {counts}")
