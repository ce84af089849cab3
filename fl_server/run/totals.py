"""Totals over the committed rounds of a run, as text in the ledger: sums, best rounds, the clients' shares."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median_low
from typing import Any, NamedTuple, Self

from fl_server.rounds.metrics import BY_ACCURACY, BY_LOSS, Best, Criterion, Judged, has_evaluation
from fl_server.run.round_statistics import RoundStatistics
from fl_server.store.records import ClientEvaluation, CommitRecord

FEWEST_DUE = 5.0
"""Updates that a client must be due before its share says anything."""
SHARE_STATISTICS = ("lowest", "worst_decile", "median", "highest")
_BELOW = 0.5
"""Share of its due below which operators are told of a client."""
_CERTAIN = 4.0
"""Standard deviations of a fair draw by which such a client must be below its due."""
_DIGITS = 4
METRIC = "accuracy"
FEWEST_CLIENTS, FEWEST_EXAMPLES = 3, 20
"""Fewest clients that are compared, and held-out examples of one that is."""
_USUAL, _SHARE, _RISE = 0.5, 0.5, 0.05
"""Accuracy of the others from which on clients are compared; share of it, and rise since the evaluation before, that a
client must exceed."""


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
    """The variance of the number of counted updates, if the drawn clients are counted at random."""

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
        """The totals as JSON values."""
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


def criteria(of_run: Criterion) -> tuple[Criterion, ...]:
    """What the best values of a run are kept for: its own criterion, and loss and accuracy, which dashboards show."""
    return (of_run, *(criterion for criterion in (BY_LOSS, BY_ACCURACY) if criterion.metric != of_run.metric))


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
        """The totals as JSON values."""
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
    """The shares of the clients."""
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
        """The totals as JSON."""
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


@dataclass(slots=True)
class LabelOrder:
    """What the evaluations of one run say of the order of its clients' labels."""

    suspected: frozenset[str] = frozenset()
    """The clients that stay behind, by the two newest evaluations."""
    told: set[str] | None = None
    """Clients that the run's history names. None: it was not read yet."""
    _last: Sequence[ClientEvaluation] = ()

    def compare(self, answers: Sequence[ClientEvaluation]) -> list[tuple[str, float, float]]:
        """Compare the answers of one more round with those before: the clients that stay behind, as of `behind`."""
        staying = behind(answers, self._last)
        self._last, self.suspected = answers, frozenset(client for client, _, _ in staying)
        return staying

    def restore(self, before: Sequence[ClientEvaluation], last: Sequence[ClientEvaluation]) -> None:
        """Continue after a restart with the answers of the two newest rounds with evaluations."""
        self._last = before
        self.compare(last)


def behind(answers: Sequence[ClientEvaluation], before: Sequence[ClientEvaluation]) -> list[tuple[str, float, float]]:
    """(client, its accuracy, the median of the others) of clients that stay behind in two evaluations of a run.

    answers: of one round; before: of an earlier evaluated one.
    """
    now, then = _accuracies(answers), _accuracies(before)
    return [
        (client, accuracy, usual)
        for client, accuracy in now.items()
        if (usual := _far_behind(client, now)) and _far_behind(client, then) and accuracy - then[client] < _RISE
    ]


def _far_behind(client: str, accuracies: dict[str, float]) -> float:
    """The median of the other clients if this one is far behind it, else 0."""
    others = [accuracy for other, accuracy in accuracies.items() if other != client]
    if client not in accuracies or len(others) < FEWEST_CLIENTS - 1:
        return 0.0
    usual = median_low(others)
    return usual if usual >= _USUAL and accuracies[client] <= _SHARE * usual else 0.0


def _accuracies(answers: Sequence[ClientEvaluation]) -> dict[str, float]:
    return {
        answer.client_id: answer.metrics[METRIC]
        for answer in answers
        if METRIC in answer.metrics and answer.num_examples >= FEWEST_EXAMPLES
    }
