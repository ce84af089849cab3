"""Gauges that are read from the runs at each scrape, so that they are never outdated and survive a restart.

They are read in a scraper's thread while the event loop goes on: a gauge reads only values of a run that the loop
replaces and never changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fl_common.metrics import ANY, Declaration, Values
from fl_server.clients.draw_rules import RULES
from fl_server.metrics import Metrics
from fl_server.rounds.metrics import STATISTICS, spread
from fl_server.run.round_statistics import SECURE_STAGES
from fl_server.run.run import Run
from fl_server.run.totals import SHARE_STATISTICS, criteria
from fl_server.runs.table import RunTable

STATES = ("waiting", "running", "paused", "completed", "stopped", "failed")

NORMS = ("update", "update_smallest", "update_largest", "aggregate", "direction")

ACCOUNTANTS = ("renyi", "loss_distributions")
"""The first one holds the budget. The second one is tighter, and needs dp-accounting."""
STATED = ("median", "largest")

GaugeValues = Mapping[Values, float]
"""Values by the labels after `run`; empty if the run has no value."""


@dataclass(frozen=True, slots=True)
class RunGauge:
    """One gauge, and how it is read from a run."""

    name: str
    meaning: str
    read: Callable[[Run], GaugeValues]
    labels: Mapping[str, Values]

    @property
    def declaration(self) -> Declaration:
        """The text for the page of metrics."""
        return Declaration(self.name, "gauge", self.meaning, {"run": ANY, **self.labels})


def _labelled(name: str, meaning: str, read: Callable[[Run], GaugeValues], /, **labels: Values) -> RunGauge:
    return RunGauge(name, meaning, read, labels)


def _plain(name: str, meaning: str, read: Callable[[Run], float | None], /) -> RunGauge:
    """A gauge with the label `run` only."""

    def values(run: Run) -> GaugeValues:
        value = read(run)
        return {} if value is None else {(): value}

    return RunGauge(name, meaning, values, {})


def _names(run: Run) -> GaugeValues:
    config = run.config
    return {(config.name or config.base_id(), config.algorithm.name, config.task.name): 1.0}


def _state(run: Run) -> GaugeValues:
    now = run.status
    return {(state,): float(state == now) for state in STATES}


def _norms(run: Run) -> GaugeValues:
    norms = run.rounds.latest_statistics.norms
    return {(of,): norms[of] for of in NORMS if of in norms}


def _epsilon(run: Run) -> GaugeValues:
    if run.account is None:
        return {}
    draws = run.state.draws
    tight = run.context.services.second.newest(run.id, run.account.question(draws))
    values = (run.account.epsilon(draws), None if tight is None else tight.epsilon)
    return {(name,): value for name, value in zip(ACCOUNTANTS, values, strict=True) if value is not None}


def _stated(run: Run) -> GaugeValues:
    stated = run.rounds.stated
    return {} if stated is None else {(name,): getattr(stated, name) for name in STATED}


def _best(run: Run) -> GaugeValues:
    """Best values by metric and by which values are better."""
    best = run.rounds.best_values()
    return {
        (criterion.metric, "lower" if criterion.lower_is_better else "higher"): best[criterion.metric].value
        for criterion in criteria(run.rounds.criterion)
        if criterion.metric in best
    }


def _secure(run: Run) -> GaugeValues:
    secure = {} if run.context.hides_cohorts else run.rounds.latest_statistics.secure
    return {(of,): count for of, count in secure.items()}


def _by_statistic(run: Run) -> GaugeValues:
    by_name = spread(run.rounds.newest_metrics())
    return {(name, statistic): value for name, values in by_name.items() for statistic, value in values.items()}


RUN_GAUGES = (
    _labelled("fl_run_info", "What the run is; always 1.", _names, name=ANY, algorithm=ANY, task=ANY),
    _labelled("fl_run_state", "1 for the state that the run is in, 0 for the others.", _state, state=STATES),
    _plain(
        "fl_run_state_since_timestamp_seconds", "Time at which it came into that state, or was restored in it.",
        lambda run: run.record.ended_at or run.run_status.since,
    ),
    _plain(
        "fl_run_cannot_write", "1 while the disk or the database takes no writes, else 0.",
        lambda run: float(bool(run.run_status.write_failure or run.run_status.upload_failure)),
    ),
    _plain("fl_round", "Committed rounds.", lambda run: run.rounds.committed),
    _plain("fl_rounds_planned", "Committed rounds at which the run ends.", lambda run: run.state.rounds),
    _plain(
        "fl_clients_per_round", 'Updates wanted in a round; none with sampling = "bernoulli".',
        lambda run: run.config.round.clients_per_round if run.config.round.sampling == "fixed" else None,
    ),
    _plain(
        "fl_clients_eligible", "Clients that could be drawn for the run now.",
        lambda run: 0 if run.ended else sum(not run.state.barred(client) for client in run.state.eligible),
    ),
    _labelled(
        "fl_clients_not_drawn", "Registered clients that the run cannot draw, by reason, while too few can be drawn.",
        lambda run: {} if run.ended else {(reason,): n for reason, n in run.eligible.not_drawn_by_reason.items()},
        reason=tuple(dict.fromkeys(rule.reason for rule in RULES)),
    ),
    _plain(
        "fl_buffered_updates", "Updates in the buffer that no step has taken.",
        lambda run: len(run.state.buffer) if run.state.policy.buffered and not run.ended else None,
    ),
    _plain(
        "fl_model_versions", "Models in memory of a run with a buffer: the latest one, and all others that are in use.",
        lambda run: run.model.versions if run.state.policy.buffered and not run.ended else None,
    ),
    _plain("fl_over_selection", "Clients drawn for each update wanted.", lambda run: run.state.draws_per_update),
    _plain("fl_round_deadline_seconds", "Deadline of an attempt.", lambda run: run.config.round.deadline_s),
    _plain(
        "fl_last_commit_timestamp_seconds", "Time of the last commit.",
        lambda run: latest.committed_at if (latest := run.rounds.latest) else None,
    ),
    _plain(
        "fl_training_loss", "Mean training loss of the last round's accepted clients.",
        lambda run: latest.training_loss if (latest := run.rounds.latest) else None,
    ),
    _labelled(
        "fl_evaluation",
        "The newest value of each metric; clients_ marks those of clients, averaged_ the averaged model.",
        lambda run: {(name,): value for name, value in run.rounds.newest_metrics().items()}, metric=ANY,
    ),
    _labelled(
        "fl_evaluation_best", "Best values so far, of the metric that selects the best round, loss and accuracy.",
        _best, metric=ANY, better=("lower", "higher"),
    ),
    _labelled(
        "fl_client_evaluation", "The newest evaluation by clients: mean, deviation, worst and best tenth over them.",
        _by_statistic, metric=ANY, statistic=tuple(STATISTICS),
    ),
    _labelled(
        "fl_norm", "L2 norms of the last round: updates (mean, smallest, largest), movement, direction.",
        _norms, of=NORMS,
    ),
    _plain(
        "fl_state_members", "Clients with a state in the run's sum; 0 without a sum, and after the run's end.",
        lambda run: len(run.client_states.members) if run.context.algorithm.needs_population and not run.ended else 0,
    ),
    _plain(
        "fl_state_members_missing",
        "Those of them that have not taken part for many rounds and cannot be drawn, as of the last commit.",
        lambda run: len(run.client_states.missing),
    ),
    _plain(
        "fl_clients_left_out", "Clients left out of the run because they lost their states too often.",
        lambda run: 0 if run.ended else len(run.client_states.left_out),
    ),
    _plain(
        "fl_clients_refusing", "Clients left out of the run because the policies of their sites refuse it.",
        lambda run: 0 if run.ended else len(run.context.fleet.eligibility.policy.of(run.id)),
    ),
    _labelled(
        "fl_client_share_of_due",
        "Counted updates of a client divided by those that it is due, over clients that are due five or more.",
        lambda run: {(name,): value for name, value in run.rounds.shares.spread.items()}, statistic=SHARE_STATISTICS,
    ),
    _plain(
        "fl_clients_below_due", "Clients with less than half of the counted updates that they are due.",
        lambda run: len(run.rounds.shares.too_low),
    ),
    _labelled(
        "fl_privacy_epsilon",
        "What the run's privacy account has spent, by accountant; the second one's number comes some seconds later.",
        _epsilon, accountant=ACCOUNTANTS,
    ),
    _labelled(
        "fl_privacy_stated_epsilon",
        "What devices of the run's counted updates state that their data has spent, with privacy of records.",
        _stated, statistic=STATED,
    ),
    _labelled(
        "fl_secure_clients",
        "Clients of the last round by the stage of secure aggregation that they completed, and those that dropped out"
        " before the sum; the shares for a secret.",
        _secure, of=SECURE_STAGES,
    ),
    _plain(
        "fl_update_direction_cosine", "Cosine between the last round's movement and minus its direction.",
        lambda run: run.rounds.latest_statistics.cosine,
    ),
)  # fmt: skip
COUNT = Declaration("fl_runs", "gauge", "All runs of the coordinator, by state.", {"state": STATES})


class RunsCollector(Collector):
    """Reads the runs of one coordinator at a scrape."""

    def __init__(self, metrics: Metrics, table: RunTable) -> None:
        self._reported, self._table = metrics.reported, table
        for declaration in (COUNT, *(gauge.declaration for gauge in RUN_GAUGES)):
            metrics.factory.declare(declaration)
        metrics.registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Names only; the registry checks them for duplicates."""
        return (_family(declaration) for declaration in (COUNT, *(gauge.declaration for gauge in RUN_GAUGES)))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called in a scraper's thread."""
        runs, states = list(self._table.loaded.values()), Counter[str]()
        reported = {run.id: run for run in runs if run.id in self._reported}
        for run in runs:  # one that is not reported ended long ago, or is still to be restored after a start
            states[run.status if run.id in reported else run.record.state] += 1
        count = _family(COUNT)
        for state in STATES:
            count.add_metric([state], states[state])
        yield count
        for gauge in RUN_GAUGES:
            family = _family(gauge.declaration)
            for run_id, run in reported.items():
                for labels, value in gauge.read(run).items():
                    family.add_metric([run_id, *labels], value)
            yield family


def _family(declaration: Declaration) -> GaugeMetricFamily:
    return GaugeMetricFamily(declaration.name, declaration.meaning, labels=list(declaration.labels))
