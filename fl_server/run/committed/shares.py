"""Counted updates by client, beside what the client is due: how far the rounds of a run are from a fair sample.

A round that draws more clients than it counts is due to count each of them with the same probability, the counted ones
divided by the drawn ones. A client's due is the sum of these over the rounds that drew it. So its weight in the draw
and the time that it was connected are part of it, and what is left is which of the drawn clients come first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from fl_server.metrics.runs import SHARE_STATISTICS

FEWEST_DUE = 5.0
"""Updates that a client must be due before its share says anything."""
_BELOW = 0.5
"""Share of its due below which operators are told of a client."""
_CERTAIN = 4.0
"""Standard deviations of a fair draw by which such a client must be below its due."""
_DIGITS = 4


class Draw(NamedTuple):
    """One committed round."""

    drawn: frozenset[str]
    """All clients of its cohorts."""
    counted: frozenset[str]
    """Those with an accepted update."""


class Share(NamedTuple):
    """One client over the committed rounds of a run."""

    counted: int = 0
    due: float = 0.0
    variance: float = 0.0
    """Of the number of counted updates, if the drawn clients are counted at random."""

    @property
    def of_due(self) -> float:
        """Counted updates divided by those that are due."""
        return self.counted / self.due

    @property
    def too_low(self) -> bool:
        """Whether it is below half of its due, and not by chance."""
        behind = self.due - self.counted
        return self.due >= FEWEST_DUE and self.of_due < _BELOW and behind > _CERTAIN * math.sqrt(self.variance)


@dataclass(slots=True)
class ClientShares:
    """The shares of the clients of a run."""

    by_client: dict[str, Share] = field(default_factory=dict)
    too_low: Mapping[str, Share] = field(default_factory=dict)
    """The clients of which operators are told. Replaced and never changed: a scraper's thread reads it."""
    told: set[str] | None = None
    """Clients that the run's history names. None: it was not read yet."""
    spread: Mapping[str, float] = field(default_factory=dict)
    """Statistic -> share of the due, over the clients that are due enough; empty without one. Replaced, too."""

    def add(self, draw: Draw) -> None:
        """Add the next committed round. `look` makes it visible."""
        if not draw.drawn:
            return
        chance = min(1.0, len(draw.counted) / len(draw.drawn))
        for client in draw.drawn:
            before = self.by_client.get(client, Share())
            self.by_client[client] = Share(
                before.counted + (client in draw.counted),
                before.due + chance,
                before.variance + chance * (1.0 - chance),
            )

    def look(self) -> None:
        """Compare the clients with what they are due."""
        known = {client: share for client, share in self.by_client.items() if share.due >= FEWEST_DUE}
        self.too_low = {client: share for client, share in known.items() if share.too_low}
        self.spread = _spread(sorted(share.of_due for share in known.values()))

    def copy(self) -> ClientShares:
        """An own copy of the counts."""
        return ClientShares(dict(self.by_client))

    def to_values(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            client: [share.counted, round(share.due, _DIGITS), round(share.variance, _DIGITS)]
            for client, share in self.by_client.items()
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """What `to_values` made."""
        return cls({client: Share(*share) for client, share in values.items()})


def _spread(shares: Sequence[float]) -> dict[str, float]:
    """shares: from the lowest."""
    if not shares:
        return {}
    tenth = shares[: math.ceil(len(shares) / 10)]
    values = shares[0], sum(tenth) / len(tenth), shares[len(shares) // 2], shares[-1]
    return dict(zip(SHARE_STATISTICS, values, strict=True))
