"""Gauges that are read from the runs at each scrape, so that they are never outdated and survive a restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fl_common.metrics import ANY, Declaration, MetricFactory, Values
from fl_server.metrics.per_run import ReportedRuns
from fl_server.rounds.metrics import STATISTICS, spread

STATES = ("waiting", "running", "paused", "completed", "stopped", "failed")
SHARE_STATISTICS = ("lowest", "worst_decile", "median", "highest")
NORMS = ("update", "update_smallest", "update_largest", "aggregate", "direction")

GaugeValues = Mapping[Values, float]
"""Values by the labels after `run`; empty if the run has no value."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """One run at one moment. None: the run has no such value."""

    name: str
    algorithm: str
    task: str
    state: str
    """One of STATES."""
    state_since: float
    """Unix time at which it came into its state, or was restored in it."""
    cannot_write: bool
    rounds: int
    """Committed ones."""
    planned_rounds: int
    clients_per_round: int | None
    eligible: int
    over_selection: float
    deadline_s: float
    last_commit: float | None
    """Unix time."""
    training_loss: float | None
    newest_metrics: Mapping[str, float]
    best_metrics: GaugeValues
    """Best values by metric and by which values are better: "lower" or "higher"."""
    state_members: int
    missing_members: int
    left_out: int
    refusing: int
    below_due: int
    shares: Mapping[str, float]
    norms: Mapping[str, float]
    cosine: float | None


class WatchedRun(Protocol):
    """A run as the collector reads it, in a scraper's thread while the event loop goes on.

    It must only read values that the loop replaces and never changes.
    """

    @property
    def id(self) -> str:
        """The run's id."""

    @property
    def stored_state(self) -> str:
        """The run's state in the ledger, one of STATES."""

    def figures(self) -> RunFigures:
        """The current values."""


@dataclass(frozen=True, slots=True)
class RunGauge:
    """One gauge, and how it is read from a run's figures."""

    name: str
    meaning: str
    read: Callable[[RunFigures], GaugeValues]
    labels: Mapping[str, Values]

    @property
    def declaration(self) -> Declaration:
        """The text for the page of metrics."""
        return Declaration(self.name, "gauge", self.meaning, {"run": ANY, **self.labels})


def _labelled(name: str, meaning: str, read: Callable[[RunFigures], GaugeValues], /, **labels: Values) -> RunGauge:
    return RunGauge(name, meaning, read, labels)


def _plain(name: str, meaning: str, read: Callable[[RunFigures], float | None], /) -> RunGauge:
    """A gauge with the label `run` only."""

    def values(run: RunFigures) -> GaugeValues:
        value = read(run)
        return {} if value is None else {(): value}

    return RunGauge(name, meaning, values, {})


def _by_statistic(run: RunFigures) -> GaugeValues:
    by_name = spread(run.newest_metrics)
    return {(name, statistic): value for name, values in by_name.items() for statistic, value in values.items()}


RUN_GAUGES = (
    _labelled(
        "fl_run_info", "What the run is; always 1.", lambda run: {(run.name, run.algorithm, run.task): 1.0},
        name=ANY, algorithm=ANY, task=ANY,
    ),
    _labelled(
        "fl_run_state", "1 for the state that the run is in, 0 for the others.",
        lambda run: {(state,): float(state == run.state) for state in STATES}, state=STATES,
    ),
    _plain(
        "fl_run_state_since_timestamp_seconds", "Time at which it came into that state, or was restored in it.",
        lambda run: run.state_since,
    ),
    _plain(
        "fl_run_cannot_write", "1 while the disk or the database takes no writes, else 0.",
        lambda run: float(run.cannot_write),
    ),
    _plain("fl_round", "Committed rounds.", lambda run: run.rounds),
    _plain("fl_rounds_planned", "Committed rounds at which the run ends.", lambda run: run.planned_rounds),
    _plain(
        "fl_clients_per_round", 'Updates wanted in a round; none with sampling = "bernoulli".',
        lambda run: run.clients_per_round,
    ),
    _plain("fl_clients_eligible", "Clients that could be drawn for the run now.", lambda run: run.eligible),
    _plain("fl_over_selection", "Clients drawn for each update wanted.", lambda run: run.over_selection),
    _plain("fl_round_deadline_seconds", "Deadline of an attempt.", lambda run: run.deadline_s),
    _plain("fl_last_commit_timestamp_seconds", "Time of the last commit.", lambda run: run.last_commit),
    _plain(
        "fl_training_loss", "Mean training loss of the last round's accepted clients.", lambda run: run.training_loss
    ),
    _labelled(
        "fl_evaluation",
        "The newest value of each metric; clients_ marks those of clients, averaged_ the averaged model.",
        lambda run: {(name,): value for name, value in run.newest_metrics.items()}, metric=ANY,
    ),
    _labelled(
        "fl_evaluation_best", "Best values so far, of the metric that selects the best round, loss and accuracy.",
        lambda run: run.best_metrics, metric=ANY, better=("lower", "higher"),
    ),
    _labelled(
        "fl_client_evaluation", "The newest evaluation by clients: mean, deviation and worst tenth over them.",
        _by_statistic, metric=ANY, statistic=tuple(STATISTICS),
    ),
    _labelled(
        "fl_norm", "L2 norms of the last round: updates (mean, smallest, largest), movement, direction.",
        lambda run: {(of,): run.norms[of] for of in NORMS if of in run.norms}, of=NORMS,
    ),
    _plain(
        "fl_state_members", "Clients with a state in the run's sum; 0 without a sum, and after the run's end.",
        lambda run: run.state_members,
    ),
    _plain(
        "fl_state_members_missing",
        "Those of them that have not taken part for many rounds and cannot be drawn, as of the last commit.",
        lambda run: run.missing_members,
    ),
    _plain(
        "fl_clients_left_out", "Clients left out of the run because they lost their states too often.",
        lambda run: run.left_out,
    ),
    _plain(
        "fl_clients_refusing", "Clients left out of the run because the policies of their sites refuse it.",
        lambda run: run.refusing,
    ),
    _labelled(
        "fl_client_share_of_due",
        "Counted updates of a client divided by those that it is due, over clients that are due five or more.",
        lambda run: {(name,): value for name, value in run.shares.items()}, statistic=SHARE_STATISTICS,
    ),
    _plain(
        "fl_clients_below_due", "Clients with less than half of the counted updates that they are due.",
        lambda run: run.below_due,
    ),
    _plain(
        "fl_update_direction_cosine", "Cosine between the last round's movement and minus its direction.",
        lambda run: run.cosine,
    ),
)  # fmt: skip
COUNT = Declaration("fl_runs", "gauge", "All runs of the coordinator, by state.", {"state": STATES})


class RunsCollector(Collector):
    """Reads the runs of one coordinator at a scrape."""

    def __init__(self, factory: MetricFactory, reported: ReportedRuns) -> None:
        self._reported = reported
        self.runs: Callable[[], Sequence[WatchedRun]] = list
        for declaration in (COUNT, *(gauge.declaration for gauge in RUN_GAUGES)):
            factory.declare(declaration)
        factory.registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Names only; the registry checks them for duplicates."""
        return (_family(declaration) for declaration in (COUNT, *(gauge.declaration for gauge in RUN_GAUGES)))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called in a scraper's thread."""
        figures: dict[str, RunFigures] = {}
        states: Counter[str] = Counter()
        for run in self.runs():
            if run.id in self._reported:
                figures[run.id] = run.figures()
                states[figures[run.id].state] += 1
            else:  # it ended long ago, or is still to be restored after a start
                states[run.stored_state] += 1
        count = _family(COUNT)
        for state in STATES:
            count.add_metric([state], states[state])
        yield count
        for gauge in RUN_GAUGES:
            family = _family(gauge.declaration)
            for run_id, values in figures.items():
                for labels, value in gauge.read(values).items():
                    family.add_metric([run_id, *labels], value)
            yield family


def _family(declaration: Declaration) -> GaugeMetricFamily:
    return GaugeMetricFamily(declaration.name, declaration.meaning, labels=list(declaration.labels))
