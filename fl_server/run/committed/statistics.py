"""Statistics of a round, as text in the ledger and read from it, their sums over rounds, and why a round is short."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Self

from fl_server.rounds.state import RoundState

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
        """The statistics that `to_text` wrote."""
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


_LONGEST = 500
"""Characters of a reason."""


def wanted_updates(state: RoundState) -> int:
    """The updates that a round wants, whatever the size of its cohort or of its last exchange is."""
    policy = state.policy
    return max(state.goal, policy.clients_per_round) if policy.sampling == "fixed" else state.goal


def why_short(state: RoundState, outs: Mapping[str, tuple[str, str]], without: str) -> str:
    """Why the closed round has fewer updates than it wants, with what the failures have in common; empty if it has all.

    Args:
        state: of the round.
        outs: (final state, reason) of the clients that did not deliver, by client.
        without: the clients without which the run goes on, as a sentence.
    """
    accepted, wanted = len(state.accepted), wanted_updates(state)
    if accepted >= wanted:
        return ""
    delivered = {client for client, _ in state.accepted}
    missing = [out for client, out in outs.items() if client not in delivered]
    kinds = Counter(kind for kind, _ in missing)
    text = f"round {state.round} has {accepted} of {wanted} updates"
    if kinds:
        text += ": " + ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
        why, count = Counter(why for _, why in missing).most_common(1)[0]
        text += f"; {count} of them: {why}" if count > 1 or len(missing) == 1 else f"; one of them: {why}"
    return "; ".join(filter(None, (text, without)))[:_LONGEST]
