"""How many clients are drawn for each update wanted, with close = "goal": learned from those who dropped out.

The factor f starts at `round.over_selection`. A round in which a of the drawn delivered in time and d dropped out
would have needed r = (a + d) / a, and moves it: f <- f + WEIGHT (clip(r) - f). Who was still at work when the goal was
reached was only slower, and is neither.
"""

from __future__ import annotations

WEIGHT = 0.2
"""Of the newest round: some five rounds are remembered."""
LOWEST = 1.1
"""Where nobody drops out. Over 1, or the one client that is slow today would hold a round up to its deadline."""
HIGHEST = 2.0
"""However many drop out: beyond, clients' work is wasted where a quorum and replacements serve better."""


def bounds(start: float) -> tuple[float, float]:
    """(lowest, highest) factor of a run that starts at `start`; a start beyond the usual bounds widens them."""
    return min(LOWEST, start), max(HIGHEST, start)


def adapted(factor: float, start: float, in_time: int, dropped: int) -> float:
    """The factor after a round.

    Args:
        factor: of that round, within `bounds(start)`; so is the result.
        start: the run's first factor, 1 or more.
        in_time: clients that delivered before the round closed, 1 or more.
        dropped: clients that were drawn for it and did not: lost, failed, refused, or at work after the deadline.
    """
    lowest, highest = bounds(start)
    seen = min(max((in_time + dropped) / in_time, lowest), highest)
    return factor + WEIGHT * (seen - factor)
