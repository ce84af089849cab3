"""Clients drawn for each update wanted, with close = "goal": adapted to the drop-outs of earlier rounds.

The factor f starts at `round.over_selection`. A round in which a of the drawn delivered in time and d dropped out
would have needed r = (a + d) / a, and changes it: f <- f + WEIGHT (clip(r) - f). A client that was still at work when
the goal was reached was only slower, and counts as neither.
"""

from __future__ import annotations

WEIGHT = 0.2
"""Weight of the newest round: about five rounds have an influence."""
LOWEST = 1.1
"""Factor without drop-outs. Above 1, so that one slow client does not delay a round to its deadline."""
HIGHEST = 2.0
"""Largest factor. Beyond it clients' work is wasted; a quorum and replacements are better."""


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
