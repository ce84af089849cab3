"""Fewer points that show the same curve: largest triangle three buckets (Steinarsson 2013), with both ends kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

MOST_POINTS = 2000
"""Of a curve in a chart: more than a screen has columns."""


def thinned(xs: Sequence[float], ys: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """Indices of the points to keep, in order. The first and the last are kept.

    The points between are divided into buckets. Each bucket gives the point that makes the largest triangle with the
    point chosen before it and the mean of the next bucket.

    Args:
        xs: rising.
        ys: as many; a value that is not finite counts as 0 in the triangles.
        most: at least 3.
    """
    if most < 3:
        raise ValueError(f"expected at least 3 points to keep, got {most}")
    count = len(xs)
    if count <= most:
        return list(range(count))
    values = [y if math.isfinite(y) else 0.0 for y in ys]
    # Bounds of the buckets: the first and the last point are buckets of their own.
    bounds = [1 + (count - 2) * bucket // (most - 2) for bucket in range(most - 1)]
    kept = [0]
    for bucket in range(most - 2):
        begin, end = bounds[bucket], bounds[bucket + 1]
        after = range(end, bounds[bucket + 2]) if bucket + 2 < len(bounds) else range(count - 1, count)
        mean_x = sum(xs[i] for i in after) / len(after)
        mean_y = sum(values[i] for i in after) / len(after)
        kept.append(_largest(xs, values, kept[-1], range(begin, end), (mean_x, mean_y)))
    return [*kept, count - 1]


def _largest(  # noqa: PLR0913, PLR0917 - a point, its curve, and what it is compared with
    xs: Sequence[float], ys: Sequence[float], last: int, bucket: range, mean: tuple[float, float]
) -> int:
    """The point of a bucket that makes the largest triangle."""
    x0, y0 = xs[last], ys[last]
    dx, dy = mean[0] - x0, mean[1] - y0
    return max(bucket, key=lambda i: abs(dx * (ys[i] - y0) - (xs[i] - x0) * dy))
