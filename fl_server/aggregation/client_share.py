"""Limits a client's share of a round's examples. The result depends only on the accepted list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from algorithms import UpdateInfo


def capped(cohort: Sequence[UpdateInfo], share: float) -> list[UpdateInfo]:
    """The cohort, with fewer examples for clients that would have more than `share` of the remaining total.

    All capped clients count alike. With fewer than 1 / share clients the limit is impossible, and all count alike.
    """
    cap = _cap([info.num_examples for info in cohort], Fraction(share))
    return [replace(info, num_examples=min(info.num_examples, cap)) for info in cohort]


def _cap(counts: Sequence[int], share: Fraction) -> int:
    """The largest number of examples that does not exceed the share once all larger numbers are cut to it."""
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


def lighter(cohort: Sequence[UpdateInfo], before: Sequence[float], after: Sequence[float]) -> tuple[str, ...]:
    """The clients whose weights were cut."""
    return tuple(info.client_id for info, was, now in zip(cohort, before, after, strict=True) if now < was)


def left_out(cohort: Sequence[UpdateInfo], taken: Sequence[UpdateInfo]) -> tuple[str, ...]:
    """The clients of a cohort that are not among those whose updates a reducer took."""
    ids = {info.client_id for info in taken}
    return tuple(info.client_id for info in cohort if info.client_id not in ids)
