"""What a round came to beside its model: for whoever looks at a run. Nothing is decided by it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Self

MOST_STALE = 17
"""Of updates that are staler than 16 rounds it is only kept that they are."""


@dataclass(slots=True)
class Account:
    """From one commit to the next, since the coordinator's last start; or a run's sums, without norms and cosine."""

    norms: dict[str, float] = field(default_factory=dict)
    """L2: "update", "update_smallest", "update_largest", "aggregate", "direction"."""
    cosine: float | None = None
    """Between the step and minus the direction; None without one."""
    assignments: Counter[str] = field(default_factory=Counter)
    """By how they ended."""
    refused: Counter[str] = field(default_factory=Counter)
    """Updates by why."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Updates by the rounds since their model, up to MOST_STALE."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By phase."""
    quorum_missed: int = 0
    """Attempts that closed with fewer updates than the quorum."""

    def add(self, other: Account) -> None:
        """Sum another round up."""
        self.assignments.update(other.assignments)
        self.refused.update(other.refused)
        self.staleness.update(other.staleness)
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self.quorum_missed += other.quorum_missed

    def to_text(self) -> str:
        """As JSON, without what is empty: a run may have 100,000 rounds, and few of them are looked at."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        kept = {name: value for name, value in values.items() if value not in ({}, None)}
        return json.dumps(kept, separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> Self:
        """Read back; empty where an older version wrote the round."""
        values = json.loads(text) if text else {}
        return cls(
            norms=values.get("norms", {}),
            cosine=values.get("cosine"),
            assignments=Counter(values.get("assignments")),
            refused=Counter(values.get("refused")),
            staleness=Counter({int(rounds): count for rounds, count in values.get("staleness", {}).items()}),
            seconds=dict(values.get("seconds", {})),
            quorum_missed=values.get("quorum_missed", 0),
        )
