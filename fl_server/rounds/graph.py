"""What a round with secure aggregation needs: who holds shares of whose secrets, and how many clients must stay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Graph:
    """The graph of a round, and its least numbers."""

    holders: Mapping[str, frozenset[str]] = field(hash=False)
    """For each client those that hold a share of its secrets, itself included."""
    threshold: int
    """Shares that open a secret."""
    quorum: int
    """Fewest clients that share, and fewest signatures on the list of survivors."""
    fewest: int
    """Fewest survivors."""

    def opens_all(self, clients: Iterable[str], openers: AbstractSet[str]) -> bool:
        """Whether the openers can open a secret of each of these clients."""
        return all(len(self.holders.get(client, frozenset()) & openers) >= self.threshold for client in clients)
