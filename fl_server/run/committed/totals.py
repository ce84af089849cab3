"""Sums and best values of committed rounds, kept in place of the commits: a run may have 100,000 rounds.

Settled rounds are those whose metrics are final. Their totals are in the ledger, so that a start need not read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from fl_server.rounds.client_metrics import has_evaluation
from fl_server.rounds.directions import BY_ACCURACY, BY_LOSS, Criterion
from fl_server.rounds.stop_rules import Best, Judged
from fl_server.run.committed.shares import ClientShares
from fl_server.run.committed.statistics import RoundStatistics
from fl_server.store.records import CommitRecord


def criteria(of_run: Criterion) -> tuple[Criterion, ...]:
    """What the best values of a run are kept for: its own criterion, and loss and accuracy, which dashboards show."""
    return (of_run, *(each for each in (BY_LOSS, BY_ACCURACY) if each.metric != of_run.metric))


@dataclass(slots=True)
class RoundSums:
    """Sums over rounds from round 0 on."""

    rounds: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    epoch: int = 0
    """State epoch of the newest round."""
    of_epoch: int = 0
    """The newest rounds that are of this epoch."""
    statistics: RoundStatistics = field(default_factory=RoundStatistics)
    """Counts and times; no norms."""

    def add(self, commit: CommitRecord, statistics: RoundStatistics) -> None:
        """Add the next round."""
        self.rounds = commit.round + 1
        self.bytes_down += commit.bytes_down
        self.bytes_up += commit.bytes_up
        self.of_epoch = self.of_epoch + 1 if commit.state_epoch == self.epoch else 1
        self.epoch = commit.state_epoch
        self.statistics.add(statistics)

    def to_values(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "statistics": self.statistics.to_text()}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """What `to_values` made."""
        return cls(**{**values, "statistics": RoundStatistics.from_text(values["statistics"])})


@dataclass(slots=True)
class SettledRounds:
    """The totals of rounds 0 to `sums.rounds` - 1."""

    criterion: Criterion
    """It selects the best round."""
    sums: RoundSums = field(default_factory=RoundSums)
    best: dict[str, Best] = field(default_factory=dict)
    """The best evaluated round, by each metric of `criteria`."""
    best_commit: CommitRecord | None = None
    """The best round by the run's metric."""
    newest: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The newest (round, value) of each metric."""
    shares: ClientShares = field(default_factory=ClientShares)
    """Of the clients."""
    since: int = 0
    """The round from which on stop rules count evaluations: the last extension."""
    judged: Judged = field(default_factory=Judged)
    """The evaluations since then."""

    def add(self, commit: CommitRecord, since: int) -> None:
        """Add the next round. since: the round of the run's last extension."""
        self.sums.add(commit, RoundStatistics.from_text(commit.statistics))
        self.add_metrics(commit)
        if commit.round >= since:
            before = self.judged_since(since)
            evaluated = has_evaluation(commit.metrics, self.criterion.metric)
            self.judged = before.after(self.criterion, (commit.round, commit.metrics)) if evaluated else before
            self.since = since

    def add_metrics(self, commit: CommitRecord) -> None:
        """Compare the metrics of a round, which may have come late."""
        for name, value in commit.metrics.items():
            if commit.round >= self.newest.get(name, (-1, 0.0))[0]:
                self.newest[name] = (commit.round, value)
        for criterion in criteria(self.criterion):
            metric = criterion.metric
            best, reached = self.best.get(metric), commit.metrics.get(metric)
            if reached is not None and criterion.better(reached, best.value if best else None):
                self.best[metric] = Best(commit.round, reached)
                self.best_commit = commit if metric == self.criterion.metric else self.best_commit

    def judged_since(self, since: int) -> Judged:
        """What the stop rules need of the settled evaluations from a round on."""
        return self.judged if self.since == since else Judged()

    def to_text(self) -> str:
        """As JSON."""
        own = {"sums": self.sums.to_values(), "shares": self.shares.to_values()}
        return json.dumps({**asdict(replace(self, shares=ClientShares())), **own}, separators=(",", ":"))

    @classmethod
    def from_text(cls, criterion: Criterion, text: str) -> Self | None:
        """The totals that `to_text` wrote; None if they are of another criterion or of another format."""
        try:
            values = json.loads(text)
            if Criterion(**values["criterion"]) != criterion:
                return None
            judged, commit = values["judged"], values["best_commit"]
            return cls(
                criterion=criterion,
                sums=RoundSums.from_values(values["sums"]),
                best={name: Best(**best) for name, best in values["best"].items()},
                best_commit=CommitRecord.of(commit) if commit else None,
                shares=ClientShares.from_values(values.get("shares", {})),
                newest={name: (round_, value) for name, (round_, value) in values["newest"].items()},
                since=values["since"],
                judged=Judged(Best(**judged["best"]) if judged["best"] else None, judged["waited"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
