"""Statistics of a round, as text in the ledger and read from it, and their sums over rounds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Self

MOST_STALE = 17
"""Updates staler than 16 rounds are counted together."""


@dataclass(slots=True)
class RoundStatistics:
    """Counts and norms from one commit to the next, since the coordinator's start; or a run's totals, without norms."""

    norms: dict[str, float] = field(default_factory=dict)
    """L2: "update", "update_smallest", "update_largest", "aggregate", "direction"."""
    cosine: float | None = None
    """Between the model's movement and minus the direction; None without a direction."""
    assignments: Counter[str] = field(default_factory=Counter)
    """By final state."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refused updates by reason."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Updates by the number of rounds since their model, up to MOST_STALE."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""
    quorum_missed: int = 0
    """Attempts that closed with fewer updates than the quorum."""
    short: int = 0
    """Rounds that were committed with fewer updates than they wanted."""
    why_short: str = ""
    """The latest such round, with what its failures have in common."""

    def add(self, other: RoundStatistics) -> None:
        """Add the counts of another round."""
        self.assignments.update(other.assignments)
        self.refused.update(other.refused)
        self.staleness.update(other.staleness)
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self.quorum_missed += other.quorum_missed
        self.short += other.short
        self.why_short = other.why_short or self.why_short

    def to_text(self) -> str:
        """As JSON, without empty fields: a run may have 100,000 rounds."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        kept = {name: value for name, value in values.items() if value not in ({}, None, "")}
        return json.dumps(kept, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The statistics that `to_text` wrote; empty for a round that an older version wrote."""
        values = json.loads(text) if text else {}
        return cls(
            norms=values.get("norms", {}),
            cosine=values.get("cosine"),
            assignments=Counter(values.get("assignments")),
            refused=Counter(values.get("refused")),
            staleness=Counter({int(rounds): count for rounds, count in values.get("staleness", {}).items()}),
            seconds=dict(values.get("seconds", {})),
            quorum_missed=values.get("quorum_missed", 0),
            short=values.get("short", 0),
            why_short=values.get("why_short", ""),
        )
