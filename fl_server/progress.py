"""What a run has done, for people and programs that watch it: counters, the latest and best rounds, and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from fl_server.account import Account
from fl_server.client_metrics import has_evaluation
from fl_server.stop_rules import Best, Evaluation, best_round
from fl_server.store.base import CommitRecord, UpdateRecord

LOSS = "loss"


@dataclass(frozen=True, slots=True)
class Progress:
    """One thing that happened in a run."""

    event: str
    """"phase", "admitted", "client_out", "committed", "evaluated" or "state"."""
    detail: str = ""
    commit: CommitRecord | None = None
    """The round that a "committed" or "evaluated" is about."""


class Watchers:
    """Everybody who watches a run. A watcher that does not keep up is ended rather than waited for."""

    _BACKLOG = 10_000

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[Progress | None]] = set()

    def tell(self, progress: Progress) -> None:
        """Hand an event to every watcher."""
        for queue in list(self._queues):
            if queue.qsize() < self._BACKLOG:
                queue.put_nowait(progress)
            else:
                queue.put_nowait(None)
                self._queues.discard(queue)

    def end(self) -> None:
        """No more events will come."""
        for queue in self._queues:
            queue.put_nowait(None)

    @contextmanager
    def watch(self) -> Iterator[AsyncIterator[Progress]]:
        """Events from now on."""
        queue: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._queues.add(queue)

        async def events() -> AsyncIterator[Progress]:
            while (progress := await queue.get()) is not None:
                yield progress

        try:
            yield events()
        finally:
            self._queues.discard(queue)


@dataclass
class RoundLog:
    """The committed rounds of a run, and the bytes of the one under way."""

    metric: str
    commits: dict[int, CommitRecord] = field(default_factory=dict)
    bytes_down: int = 0
    """Of the round under way."""
    bytes_up: int = 0
    account: Account = field(default_factory=Account)
    """Of the round under way."""
    latest_account: Account = field(default_factory=Account)
    """Of the newest committed round."""
    sums: Account = field(default_factory=Account)
    """Over all committed rounds."""
    _fetched: set[str] = field(default_factory=set)
    """Clients that fetch the model of the round under way from this process."""
    _resumed: set[str] = field(default_factory=set)
    """Clients that send their update of it to this process."""
    _each: int = 0
    """Bytes down to a client for the exchange under way, where that was so before the last start; else 0."""
    under_way: set[int] = field(default_factory=set)
    """Rounds that clients evaluate now: one of them may yet turn out the best."""
    _best: dict[str, Best] = field(default_factory=dict)
    """The best evaluated round, by the run's metric and by the loss."""
    _newest: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Of each metric the newest round that has it, and its value."""
    _latest: int = -1
    _committed: tuple[int, int] = (0, 0)
    """Bytes down and up of all committed rounds. Like the best one not counted anew: a run may have 100,000."""

    def add(self, commit: CommitRecord) -> None:
        """A round was committed, which was not there before; counting starts anew."""
        self.commits[commit.round] = commit
        self._latest = commit.round
        self.latest_account, self.account = Account.of(commit.account), Account()
        self.sums.add(self.latest_account)
        down, up = self._committed
        self._committed = (down + commit.bytes_down, up + commit.bytes_up)
        self._weigh(commit)
        self.bytes_down = self.bytes_up = self._each = 0
        self._fetched.clear()
        self._resumed.clear()

    def picked_up(self, each: int, delivered: Iterable[UpdateRecord]) -> None:
        """The round was under way when the coordinator stopped: who had delivered had fetched what it needs for that.

        each: bytes down to one client for the exchange.
        """
        self._each = each
        for update in delivered:
            self.bytes_up += update.size_bytes
            self.delivers(update.client_id)

    def fetches(self, client: str, offset: int) -> None:
        """A client fetches the model from an offset on; what came before a restart was counted by nobody."""
        self.bytes_down += offset if self._each and client not in self._fetched else 0
        self._fetched.add(client)

    def sends(self, client: str, offset: int) -> None:
        """A client sends its update from an offset on; likewise."""
        self.bytes_up += offset if self._each and client not in self._resumed else 0
        self._resumed.add(client)

    def delivers(self, client: str) -> None:
        """A client has sent all: one that fetched nothing since a restart did so before."""
        self.bytes_down += self._each if client not in self._fetched else 0
        self._fetched.add(client)

    def evaluated(self, round_: int, metrics: Mapping[str, float]) -> CommitRecord:
        """An evaluation of a committed round is there: beside what another one said of it."""
        commit = self.commits[round_]
        self.commits[round_] = replace(commit, metrics={**commit.metrics, **metrics})
        self._weigh(self.commits[round_])
        return self.commits[round_]

    def _weigh(self, commit: CommitRecord) -> None:
        """Compare a round's evaluation with the best one; it may have been that, and have become worse."""
        for name, value in commit.metrics.items():
            if commit.round >= self._newest.get(name, (-1, 0.0))[0]:
                self._newest[name] = (commit.round, value)
        for metric in dict.fromkeys((self.metric, LOSS)):
            self._weigh_by(metric, commit)

    def _weigh_by(self, metric: str, commit: CommitRecord) -> None:
        best, rivals = self._best.get(metric), [(commit.round, commit.metrics)]
        if best is not None and best.round != commit.round:
            rivals.append((best.round, self.commits[best.round].metrics))
        elif best is not None and commit.metrics.get(metric) != best.value:
            rivals = [(each.round, each.metrics) for each in self.commits.values()]
        if (found := best_round(metric, rivals)) is not None:
            self._best[metric] = found
        else:
            self._best.pop(metric, None)

    @property
    def latest(self) -> CommitRecord | None:
        """The newest committed round."""
        return self.commits.get(self._latest)

    @property
    def best(self) -> Best | None:
        """The best evaluated round, by the run's metric."""
        return self._best.get(self.metric)

    def bests(self) -> dict[str, Best]:
        """The best values so far of the run's metric and of the loss."""
        return dict(self._best)

    def sums_so_far(self) -> Account:
        """Over all committed rounds and the one under way."""
        sums = Account()
        sums.add(self.sums)
        sums.add(self.account)
        return sums

    def newest(self) -> dict[str, float]:
        """The newest value of each metric, whoever found it."""
        return {name: value for name, (_, value) in dict(self._newest).items()}

    @property
    def evaluations(self) -> list[Evaluation]:
        """(round, metrics) of the rounds that were evaluated by whom the run's metric comes from, in order."""
        commits = self.commits.values()
        return [(commit.round, commit.metrics) for commit in commits if has_evaluation(commit.metrics, self.metric)]

    @property
    def total_bytes(self) -> tuple[int, int]:
        """Tensor bytes down and up, the round under way included."""
        down, up = self._committed
        return self.bytes_down + down, self.bytes_up + up
