"""What is read from the runs themselves whenever somebody asks: no copies that are behind, or gone after a restart.

A scraper's thread reads here while the event loop goes on. What it reads are values that the loop replaces and never
changes: a state, a record, the latest commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fl_server.client_metrics import STATISTICS, spread
from fl_server.metrics.per_run import ToldRuns
from protos.metrics import ANY, Declaration, Kit, Values

if TYPE_CHECKING:
    from fl_server.run import Run

STATES = ("waiting", "running", "paused", "completed", "stopped", "failed")
NORMS = ("update", "update_smallest", "update_largest", "aggregate", "direction")

Found = Mapping[Values, float]
"""Values by what the labels behind `run` say; empty where there is nothing to say."""


@dataclass(frozen=True, slots=True)
class Look:
    """One gauge, and where a run has its values."""

    name: str
    meaning: str
    read: Callable[[Run], Found]
    labels: Mapping[str, Values]

    @property
    def declaration(self) -> Declaration:
        """For the page."""
        return Declaration(self.name, "gauge", self.meaning, {"run": ANY, **self.labels})


def _look(name: str, meaning: str, read: Callable[[Run], Found], /, **labels: Values) -> Look:
    return Look(name, meaning, read, labels)


def _one(value: float | None) -> Found:
    return {} if value is None else {(): value}


def _info(run: Run) -> Found:
    config = run.config
    return {(config.name or config.base_id(), config.algorithm.name, config.task.name): 1.0}


def _state(run: Run) -> Found:
    status = run.status
    return {(state,): float(state == status) for state in STATES}


def _stuck(run: Run) -> Found:
    return _one(float(bool(run.cannot_write)))


def _since(run: Run) -> Found:
    return _one(run.record.ended_at or run.state_since)


def _rounds(run: Run) -> Found:
    return _one(len(run.log.commits))


def _planned(run: Run) -> Found:
    return _one(run.state.rounds)


def _eligible(run: Run) -> Found:
    return _one(0 if run.ended else len(run.state.eligible))


def _over_selection(run: Run) -> Found:
    return _one(run.state.draws_per_update)


def _deadline(run: Run) -> Found:
    return _one(run.config.round.deadline_s)


def _last_commit(run: Run) -> Found:
    return _one(run.log.latest.committed_at if run.log.latest else None)


def _training_loss(run: Run) -> Found:
    return _one(run.log.latest.training_loss if run.log.latest else None)


def _clients_per_round(run: Run) -> Found:
    section = run.config.round
    return _one(section.clients_per_round if section.sampling == "fixed" else None)


def _evaluation(run: Run) -> Found:
    return {(name,): value for name, value in run.log.newest().items()}


def _on_clients(run: Run) -> Found:
    found = spread(run.log.newest())
    return {(name, statistic): value for name, values in found.items() for statistic, value in values.items()}


def _best(run: Run) -> Found:
    return {(metric,): best.value for metric, best in run.log.bests().items()}


def _members(run: Run) -> Found:
    summed = run.behaviour.algorithm.needs_population and not run.ended
    return _one(len(run.client_states.members) if summed else 0)


def _missing(run: Run) -> Found:
    return _one(len(run.client_states.missing))


def _left_out(run: Run) -> Found:
    return _one(0 if run.ended else len(run.client_states.left_out))


def _norm(run: Run) -> Found:
    account = run.log.latest_account
    return {(of,): account.norms[of] for of in NORMS if of in account.norms}


def _cosine(run: Run) -> Found:
    return _one(run.log.latest_account.cosine)


LOOKS = (
    _look("fl_run_info", "What the run is; always 1.", _info, name=ANY, algorithm=ANY, task=ANY),
    _look("fl_run_state", "1 for the state that the run is in, 0 for the others.", _state, state=STATES),
    _look("fl_run_state_since_timestamp_seconds", "Time at which it came into it, or was read back in it.", _since),
    _look("fl_run_cannot_write", "1 while it waits for a disk or database that takes no writes, else 0.", _stuck),
    _look("fl_round", "Committed rounds.", _rounds),
    _look("fl_rounds_planned", "Committed rounds at which the run ends.", _planned),
    _look("fl_clients_per_round", 'Updates wanted in a round; none with sampling = "bernoulli".', _clients_per_round),
    _look("fl_clients_eligible", "Clients that could be drawn for the run now.", _eligible),
    _look("fl_over_selection", "Clients drawn for each update wanted.", _over_selection),
    _look("fl_round_deadline_seconds", "How long an attempt may collect.", _deadline),
    _look("fl_last_commit_timestamp_seconds", "Time of the last commit.", _last_commit),
    _look("fl_training_loss", "Mean of what the accepted clients of the last round said.", _training_loss),
    _look(
        "fl_evaluation", "The newest value of each metric: the server's, and with clients_ before them the clients'.",
        _evaluation, metric=ANY,
    ),
    _look(
        "fl_evaluation_best", "Best value so far of the metric that the run stops by, and the lowest loss.", _best,
        metric=ANY,
    ),
    _look(
        "fl_client_evaluation", "The newest evaluation by clients: mean, deviation and worst tenth over them.",
        _on_clients, metric=ANY, statistic=tuple(STATISTICS),
    ),
    _look(
        "fl_norm", "L2 norms of the last round: its updates' mean, smallest and largest; the step; the direction.",
        _norm, of=NORMS,
    ),
    _look(
        "fl_state_members", "Clients whose states a run's sum is made of; 0 without one, or once it ends.", _members,
    ),
    _look(
        "fl_state_members_missing",
        "Those of them that have taken no part for many rounds and cannot be drawn, as of the last commit.", _missing,
    ),
    _look(
        "fl_clients_left_out", "Clients that are left out of the run, for they lost their states too often.",
        _left_out,
    ),
    _look(
        "fl_update_direction_cosine", "Cosine between the last round's step and the direction that was sent for it.",
        _cosine,
    ),
)  # fmt: skip
COUNT = Declaration("fl_runs", "gauge", "All runs of the coordinator, by state.", {"state": STATES})


class RunsCollector(Collector):
    """The runs of one coordinator, at a scrape."""

    def __init__(self, kit: Kit, told: ToldRuns) -> None:
        self._told = told
        self.runs: Callable[[], Sequence[Run]] = list
        for declaration in (COUNT, *(look.declaration for look in LOOKS)):
            kit.declare(declaration)
        kit.registry.register(self)

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Names only, for whoever registers others."""
        return (_family(each) for each in (COUNT, *(look.declaration for look in LOOKS)))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called in a scraper's thread."""
        runs = self.runs()
        count, states = _family(COUNT), Counter(map(self._state_of, runs))
        for state in STATES:
            count.add_metric([state], states[state])
        yield count
        told = [run for run in runs if run.id in self._told]
        for look in LOOKS:
            family = _family(look.declaration)
            for run in told:
                for labels, value in look.read(run).items():
                    family.add_metric([run.id, *labels], value)
            yield family

    def _state_of(self, run: Run) -> str:
        """As the ledger has it where the run is told of no more, or is still to be read back after a start."""
        return run.status if run.id in self._told else run.record.state


def _family(declaration: Declaration) -> GaugeMetricFamily:
    return GaugeMetricFamily(declaration.name, declaration.meaning, labels=list(declaration.labels))
