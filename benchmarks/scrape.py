"""Reads histograms from a coordinator's metrics page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

Buckets = Mapping[float, float]
"""A histogram: cumulative number of observations by upper bound; math.inf has all."""


class Quantile(NamedTuple):
    """A value that a share of the observations does not exceed."""

    value: float
    """As in Prometheus: interpolated, as if observations were spread evenly over their bucket."""
    bound: float
    """The upper bound of the bucket, which is exact."""


def histogram(address: str, name: str) -> Buckets:
    """A histogram without labels from the metrics page at host:port."""
    with urlopen(f"http://{address}/metrics", timeout=20) as page:
        families = text_string_to_metric_families(page.read().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == f"{name}_bucket"]
    return {float(sample.labels["le"]): sample.value for sample in samples}


def quantile(before: Buckets, after: Buckets, share: float) -> Quantile:
    """Quantile of the observations between two readings. Raises ValueError if there are none."""
    counts = {bound: after[bound] - before[bound] for bound in sorted(after)}
    wanted = share * counts[math.inf]
    if not wanted:
        raise ValueError("expected observations between the two readings, and there are none")
    lower, below = 0.0, 0.0
    for bound, count in counts.items():
        if count >= wanted:
            inside = 1.0 if math.isinf(bound) else (wanted - below) / (count - below)
            return Quantile(lower if math.isinf(bound) else lower + inside * (bound - lower), bound)
        lower, below = bound, count
    raise ValueError(f"expected a histogram with all observations under +Inf, got {counts}")
