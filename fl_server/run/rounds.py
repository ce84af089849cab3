"""The rounds of a run: the committed ones, and statistics of the one under way. Statistics decide nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from fl_server.aggregation.server_update import ServerUpdateStats
from fl_server.metrics import Metrics
from fl_server.privacy_accounts import Stated
from fl_server.rounds.metrics import Best, Criterion, Evaluation, Judged, best_round, has_evaluation
from fl_server.rounds.state import Phase
from fl_server.run.round_statistics import MOST_STALE, ClientTransfers, RoundStatistics, RunBytes
from fl_server.run.totals import ClientShares, Draw, RoundSums, SettledRounds, criteria
from fl_server.store.records import CommitRecord, TotalsRecord

RECENT = 16
"""Newest commits in memory; older ones are in the ledger only. The totals are written to the ledger after as many
rounds."""


@dataclass
class RunRounds:
    """The rounds of a run: those that are committed, and what is known of the one under way."""

    criterion: Criterion
    """It selects the best round."""
    recent: dict[int, CommitRecord] = field(default_factory=dict)
    """The newest commits by round, and those since the oldest round that is being evaluated."""
    began: float | None = None
    """Time of the first draw of the round under way, by the monotonic clock; None before it."""
    statistics: RoundStatistics = field(default_factory=RoundStatistics)
    """The statistics of the round under way."""
    latest_statistics: RoundStatistics = field(default_factory=RoundStatistics)
    """The statistics of the newest committed round."""
    being_evaluated: Counter[int] = field(default_factory=Counter)
    """Rounds that are evaluated now, with the number of evaluations: one of them may still become the best."""
    transfers: ClientTransfers = field(default_factory=ClientTransfers)
    """The transfers of the clients of the round under way."""
    bytes: RunBytes = field(default_factory=RunBytes)
    """The bytes of all rounds and of the one under way."""
    shares: ClientShares = field(default_factory=ClientShares)
    """Counted updates by client."""
    stated: Stated | None = None
    """What the devices of its counted updates state, as of the newest commit; None without privacy of records."""
    changes: int = 0
    """Increases with each commit and each evaluation."""
    _sums: RoundSums = field(default_factory=RoundSums)
    """The sums over all committed rounds."""
    _settled: SettledRounds = field(init=False)
    """The sums of the rounds that are not in `recent` any more."""
    _draws: dict[int, Draw] = field(default_factory=dict)
    """The draws of the rounds in `recent`."""
    _written: int = 0
    """Settled rounds of which the ledger has the totals."""
    _best: dict[str, Best] = field(default_factory=dict)
    """The best evaluated round, by the run's metric and by the loss."""
    _newest: dict[str, tuple[int, float]] = field(default_factory=dict)
    """The newest (round, value) of each metric."""

    def __post_init__(self) -> None:
        self._settled = SettledRounds(self.criterion)

    def restore(self, totals: TotalsRecord) -> None:
        """Begin with the totals in the ledger, before any commit is added. Totals that cannot be used are ignored."""
        if (settled := SettledRounds.from_text(self.criterion, totals.content)) is not None:
            self._settled, self._written = settled, settled.sums.rounds
            self._sums, self.shares = RoundSums.from_values(settled.sums.to_values()), settled.shares.copy()
            self._best, self._newest = dict(settled.best), dict(settled.newest)
            self.bytes.restore(self._sums.bytes_down, self._sums.bytes_up)

    def add(
        self, commit: CommitRecord, extended_at: int = 0, draw: Draw | None = None, done: Iterable[str] | None = None
    ) -> None:
        """Add the next committed round; the counts of the round under way start at zero.

        extended_at: the run's committed rounds at its last extension. draw: None if the ledger has it no more.
        done: the clients whose work is over; None: all.
        """
        self.changes += 1
        if draw is not None:
            self._draws[commit.round] = draw
            self.shares.add(draw)
        self.recent[commit.round] = commit
        self.latest_statistics, self.statistics = RoundStatistics.from_text(commit.statistics), RoundStatistics()
        self._sums.add(commit, self.latest_statistics)
        self._update_best(commit)
        self._settle(extended_at)
        self.bytes.commit(self._sums.bytes_down, self._sums.bytes_up)
        if done is None:
            self.transfers.clear()
        else:
            self.transfers.forget(done)

    def _settle(self, extended_at: int) -> None:
        """Keep only the totals of the rounds before the newest ones and before all that are being evaluated."""
        before = min([self.committed - RECENT, *(+self.being_evaluated)])
        for round_ in [number for number in self.recent if number < before]:
            self._settled.add(self.recent[round_], extended_at)
            if (draw := self._draws.pop(round_, None)) is not None:
                self._settled.shares.add(draw)
            del self.recent[round_]

    def totals_due(self, run_id: str) -> TotalsRecord | None:
        """The totals of the settled rounds, if it is time to write them; the caller writes them."""
        rounds = self._settled.sums.rounds
        if rounds - self._written < RECENT:
            return None
        self._written = rounds
        return TotalsRecord(run_id, rounds, self._settled.to_text())

    def add_metrics(self, commit: CommitRecord, metrics: Mapping[str, float]) -> CommitRecord:
        """Add the metrics of an evaluation to a committed round; other metrics of the round stay."""
        self.changes += 1
        commit = self.recent.get(commit.round, commit)
        commit = replace(commit, metrics={**commit.metrics, **metrics})
        if commit.round in self.recent:
            self.recent[commit.round] = commit
        else:
            self._settled.add_metrics(commit)
        self._update_best(commit)
        return commit

    def _update_best(self, commit: CommitRecord) -> None:
        for name, value in commit.metrics.items():
            if commit.round >= self._newest.get(name, (-1, 0.0))[0]:
                self._newest[name] = (commit.round, value)
        for criterion in criteria(self.criterion):
            self._update_best_by(criterion, commit)

    def _update_best_by(self, criterion: Criterion, commit: CommitRecord) -> None:
        """Compare with the best round so far. If the best round itself became worse, compare all rounds."""
        metric = criterion.metric
        best, rivals = self._best.get(metric), [(commit.round, commit.metrics)]
        if best is not None and best.round == commit.round and commit.metrics.get(metric) != best.value:
            rivals = [(commit.round, commit.metrics) for commit in self.recent.values()]
            best = self._settled.best.get(metric)
        if best is not None and best.round != commit.round:
            rivals.append((best.round, {metric: best.value}))
        if (best := best_round(criterion, rivals)) is not None:
            self._best[metric] = best
        else:
            self._best.pop(metric, None)

    @property
    def committed(self) -> int:
        """The number of committed rounds: 0 to this number - 1 are committed."""
        return self._sums.rounds

    def rounds_of_epoch(self, state_epoch: int) -> int:
        """How many of the newest rounds are of this epoch of the client states."""
        return self._sums.of_epoch if self._sums.epoch == state_epoch else 0

    @property
    def latest(self) -> CommitRecord | None:
        """The newest committed round."""
        return self.recent.get(self.committed - 1)

    @property
    def best(self) -> Best | None:
        """The best evaluated round by the run's metric."""
        return self._best.get(self.criterion.metric)

    @property
    def best_commit(self) -> CommitRecord | None:
        """The commit of the best round."""
        return None if self.best is None else self.recent.get(self.best.round, self._settled.best_commit)

    def best_values(self) -> dict[str, Best]:
        """The best values so far, by each metric of `criteria`."""
        return dict(self._best)

    def newest_metrics(self) -> dict[str, float]:
        """The newest value of each metric, from the server's and the clients' evaluations."""
        return {name: value for name, (_, value) in dict(self._newest).items()}

    def newest_round_with(self, metric: str) -> int | None:
        """The newest round with a value of this metric."""
        return self._newest[metric][0] if metric in self._newest else None

    def totals(self) -> RoundStatistics:
        """Sums over all committed rounds and the one under way."""
        totals = RoundStatistics()
        totals.add(self._sums.statistics)
        totals.add(self.statistics)
        return totals

    def evaluations(self, since: int) -> tuple[list[Evaluation], Judged]:
        """The evaluations from a round on by the source of the run's metric: the recent ones, and those before them."""
        commits = [commit for commit in self.recent.values() if commit.round >= since]
        recent = [
            (commit.round, commit.metrics)
            for commit in commits
            if has_evaluation(commit.metrics, self.criterion.metric)
        ]
        return recent, self._settled.judged_since(since)


class RunCounters:
    """Counts events of one run in the Prometheus metrics and in the statistics of the round under way."""

    def __init__(self, metrics: Metrics, run_id: str, rounds: RunRounds, *, hidden: bool = False) -> None:
        """hidden: what became of single assignments is counted nowhere."""
        self._metrics, self._run_id, self._rounds, self._hidden = metrics, run_id, rounds, hidden

    def assignments_ended(self, state: str, number: int = 1) -> None:
        """So many assignments ended: "admitted", "failed", "lost" or "cancelled".

        One with an admitted update ends when its exchange is reduced: until then the update may still be refused.
        """
        if self._hidden:
            return
        self._metrics.assignments.labels(self._run_id, state).inc(number)
        self._rounds.statistics.assignments[state] += number

    def assignment_refused(self, reason: str) -> None:
        """An assignment ended with an update that was refused, which is counted by its reason too."""
        if self._hidden:
            return
        self._metrics.updates_refused.labels(self._run_id, reason).inc()
        self._rounds.statistics.refused[reason] += 1
        self.assignments_ended("refused")

    def staleness(self, rounds: int) -> None:
        """An update is in a step, or came too late, that was made from the model of so many rounds ago."""
        if self._hidden:
            return
        self._metrics.staleness.labels(self._run_id).observe(rounds)
        self._rounds.statistics.staleness[min(rounds, MOST_STALE)] += 1

    def weights_capped(self, clients: int) -> None:
        """The weights of so many clients were capped."""
        self._metrics.weights_capped.labels(self._run_id).inc(clients)

    def quorum_missed(self) -> None:
        """An attempt closed with fewer updates than the quorum."""
        self._metrics.quorum_missed.labels(self._run_id).inc()
        self._rounds.statistics.quorum_missed += 1

    def round_short(self, why: str) -> None:
        """The round under way is committed with fewer updates than it wanted."""
        self._metrics.rounds_short.labels(self._run_id).inc()
        self._rounds.statistics.short, self._rounds.statistics.why_short = 1, why

    def phase_ended(self, phase: Phase, seconds: float) -> None:
        """A phase ended. Time between the end of a run and its extension is not counted."""
        if phase is not Phase.ENDED:
            self._metrics.phase_seconds.labels(self._run_id, phase.value).observe(seconds)
            spent = self._rounds.statistics.seconds
            spent[phase.value] = round(spent.get(phase.value, 0.0) + seconds, 3)

    def model_computed(self, norms: ServerUpdateStats, updates: Sequence[float]) -> None:
        """The round's model was computed. updates: the norms of the accepted updates as they came; none if private."""
        statistics = self._rounds.statistics
        statistics.norms = {"aggregate": norms.aggregate, "direction": norms.direction}
        if updates:
            smallest, largest = min(updates), max(updates)
            statistics.norms |= {"update": fmean(updates), "update_smallest": smallest, "update_largest": largest}
        if norms.clip:
            statistics.norms["clip"] = norms.clip
        statistics.cosine = norms.cosine if norms.direction else None
