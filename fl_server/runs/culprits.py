"""Which updates of a closed exchange spoil it: found when it is reduced, before anything is committed.

A limit that is known beforehand is kept at the gate. Two things are known only once an exchange has closed: how long
its updates are beside each other, which is all there is to compare with before three rounds are committed; and that
their sum is not finite. What is dropped is a function of the accepted list and of committed rounds, so a coordinator
that is killed drops the same, and so does a simulation. A replay finds nothing to drop: the list in the ledger is the
one that was left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from fl_server.norms import DELTA, NormHistory
from fl_server.run_config import RoundSection

FEWEST = 3
"""Updates that are compared with each other: of two nobody can say which is the wrong one."""
OVERFLOW_TIMES = 100.0
"""Of the others' median: how long an update must be to be what made a sum overflow."""
ALONE = 1e9
"""Norm from which on an update that is alone in its round is what made its sum overflow."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An accepted update, and how long its vectors are."""

    client_id: str
    norms: Mapping[str, float]
    clip_factor: float = 1.0

    def length(self, vector: str) -> float:
        """Of a vector as it enters the sums."""
        norm = self.norms.get(vector, 0.0)
        return norm * self.clip_factor if vector == DELTA else norm


Culprits = tuple[tuple[str, str], ...]
"""(client, why)."""


def outliers(section: RoundSection, history: NormHistory, updates: Sequence[Measured]) -> Culprits:
    """Updates with a vector that is too long beside those of the same exchange.

    Only where committed rounds do not say yet how long is usual, and with a mean: other reducers are made for this.
    """
    if section.reducer != "mean" or len(updates) < FEWEST:
        return ()
    found: dict[str, str] = {}
    for vector in _vectors(updates):
        times = _times(section, vector)
        usual = median_low(update.length(vector) for update in updates)
        limit = 0.0 if history.usual(vector) else times * usual
        for update in updates:
            if limit and update.length(vector) > limit:
                found.setdefault(update.client_id, _why(vector, update.length(vector), limit, times))
    return tuple(found.items())


def of_overflow(updates: Sequence[Measured]) -> Culprits:
    """The update that is longest beside the others, if it is so long that it made a sum overflow; one at a time."""
    worst = OVERFLOW_TIMES
    culprits: Culprits = ()
    for update, vector, usual in _beside_others(updates):
        ratio = update.length(vector) / usual if usual else math.inf
        if update.length(vector) and ratio > worst:
            why = f"the sum is not finite; {vector}: norm {update.length(vector):g}, that of the others is {usual:g}"
            worst, culprits = ratio, ((update.client_id, why),)
    return culprits


def _beside_others(updates: Sequence[Measured]) -> Iterator[tuple[Measured, str, float]]:
    """(update, vector, usual length of the vector in the exchange)."""
    for vector in _vectors(updates):
        alone = len(updates) == 1
        usual = ALONE / OVERFLOW_TIMES if alone else median_low(update.length(vector) for update in updates)
        for update in updates:
            yield update, vector, usual


def _vectors(updates: Sequence[Measured]) -> list[str]:
    return sorted({vector for update in updates for vector in update.norms})


def _times(section: RoundSection, vector: str) -> float:
    if vector != DELTA:
        return section.max_relative_payload
    return section.max_relative_norm if section.over_relative_norm == "refuse" else 0.0


def _why(vector: str, length: float, limit: float, times: float) -> str:
    key = "max_relative_norm" if vector == DELTA else "max_relative_payload"
    return (
        f"{vector}: expected a norm of {limit:g} at most ({times:g} times the median of its round, round.{key}), "
        f"got {length:g}"
    )
