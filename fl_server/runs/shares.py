"""No client's examples weigh more than its share of a round: a function of the accepted list alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from algorithms import UpdateInfo


def capped(cohort: Sequence[UpdateInfo], share: float) -> list[UpdateInfo]:
    """The cohort with fewer examples for those that have more than `share` of all that then remain.

    Several may be capped; they count alike. Where there are so few clients that somebody must have more (fewer than
    1 / share), all count alike.
    """
    cap = _cap([info.num_examples for info in cohort], Fraction(share))
    return [replace(info, num_examples=min(info.num_examples, cap)) for info in cohort]


def _cap(counts: Sequence[int], share: Fraction) -> int:
    """The largest number of examples that nobody of whom exceeds the share, once all others are cut to it too."""
    falling = sorted(counts, reverse=True)
    rest = Fraction(sum(falling))
    for above, largest in enumerate(falling):
        if above * share >= 1:
            break
        # `above` clients at the cap c and the others as they are: c = share * (above * c + rest).
        cap = share * rest / (1 - above * share)
        if largest <= cap:
            return max(1, int(cap))
        rest -= largest
    return falling[-1]
