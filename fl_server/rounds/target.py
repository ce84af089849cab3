"""Cost of reaching a target: rounds, bytes and time, as papers report it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fl_server.rounds.directions import Criterion


class CommittedRound(Protocol):
    """The fields of a committed round that are used; the ledger's record and the wire's message have them."""

    @property
    def round(self) -> int: ...  # noqa: D102 - the name says it
    @property
    def metrics(self) -> Mapping[str, float]: ...  # noqa: D102 - the name says it
    @property
    def bytes_down(self) -> int: ...  # noqa: D102 - the name says it
    @property
    def bytes_up(self) -> int: ...  # noqa: D102 - the name says it
    @property
    def seconds(self) -> float: ...  # noqa: D102 - the name says it


@dataclass(frozen=True, slots=True)
class Reached:
    """The first round that reached a target, and the sums up to and with it."""

    round: int
    """0-based: round + 1 rounds were needed."""
    bytes_down: int
    bytes_up: int
    seconds: float
    """In rounds, from the draw of each to its commit."""


def rounds_to_target(criterion: Criterion, target: float, commits: Iterable[CommittedRound]) -> Reached | None:
    """The first round whose metric is at least as good as the target; None if none is. `commits` in order of round.

    Rounds without an evaluation count as cost and cannot reach the target.
    """
    down = up = 0
    seconds = 0.0
    for commit in commits:
        down, up, seconds = down + commit.bytes_down, up + commit.bytes_up, seconds + commit.seconds
        value = commit.metrics.get(criterion.metric)
        if value is not None and criterion.reaches(value, target):
            return Reached(commit.round, down, up, seconds)
    return None
