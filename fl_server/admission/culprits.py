"""Finds the accepted updates that spoil a closed exchange, before anything is committed.

The admission gate applies limits that are known beforehand. Two things are known only when an exchange has closed: the
norms of its updates relative to each other, the only comparison before three rounds are committed; and whether their
sum is finite. The result depends only on the accepted list and on committed rounds, so a restarted coordinator and a
simulation find the same updates. A replay finds none: the ledger has the list without them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from fl_server.admission.norms import DELTA, FLOOR, NormHistory
from fl_server.round_config import RoundSection

FEWEST = 3
"""Fewest updates that are compared: of two, neither is known to be the wrong one."""
OVERFLOW_TIMES = 100.0
"""Multiple of the median norm from which on an update is blamed for an overflow."""
ALONE = 1e9
"""Norm from which on the only update of a round is blamed for an overflow."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An accepted update and the norms of its vectors."""

    client_id: str
    norms: Mapping[str, float]
    clip_factor: float = 1.0

    def length(self, vector: str) -> float:
        """Norm of a vector as it enters the sums."""
        norm = self.norms.get(vector, 0.0)
        return norm * self.clip_factor if vector == DELTA else norm


Culprits = tuple[tuple[str, str], ...]
"""(client, why)."""


def outliers(
    section: RoundSection, history: NormHistory, updates: Sequence[Measured], model_norm: float = 0.0
) -> Culprits:
    """Updates with a vector that is too long relative to the others of the exchange.

    Only before committed rounds give a limit, and only for the mean: robust reducers handle outliers themselves.

    model_norm: of the trainable parameters that were sent.
    """
    if section.reducer != "mean" or len(updates) < FEWEST:
        return ()
    found: dict[str, str] = {}
    for vector in _vectors(updates):
        times = _times(section, vector)
        usual = median_low(update.length(vector) for update in updates)
        floor = FLOOR * model_norm if vector == DELTA and usual else 0.0
        limit = 0.0 if history.reference(vector) else times * max(usual, floor)
        for update in updates:
            if limit and update.length(vector) > limit:
                found.setdefault(update.client_id, _why(vector, update.length(vector), limit, times))
    return tuple(found.items())


def overflow_culprit(updates: Sequence[Measured]) -> Culprits:
    """The update that most exceeds the others, if it is long enough to make a sum overflow; one at a time."""
    worst = OVERFLOW_TIMES
    culprits: Culprits = ()
    for update, vector, usual in _with_usual(updates):
        ratio = update.length(vector) / usual if usual else math.inf
        if update.length(vector) and ratio > worst:
            why = f"the sum is not finite; {vector}: norm {update.length(vector):g}, that of the others is {usual:g}"
            worst, culprits = ratio, ((update.client_id, why),)
    return culprits


def _with_usual(updates: Sequence[Measured]) -> Iterator[tuple[Measured, str, float]]:
    """(update, vector, usual norm of the vector in the exchange)."""
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
