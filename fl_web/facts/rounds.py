"""The committed rounds of a run, and their values under fixed names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from google.protobuf.timestamp_pb2 import Timestamp

from fl_common.units import ACCURACY, BY_CLIENTS, LOSS, OF_AVERAGED, counted, measured, metric_title, percent, value
from protos.fl.v1 import admin_pb2 as pb

EVALUATED = f"{BY_CLIENTS}evaluated"
"""The metric with the number of clients that evaluated a model; it comes once their evaluation is over."""


@dataclass(frozen=True, slots=True)
class Round:
    """One committed round. Bytes are tensor bytes; times are Unix seconds of the coordinator's clock."""

    round: int
    committed: float
    seconds: float
    attempts: int
    accepted: int
    dropped: int
    training_loss: float | None
    metrics: Mapping[str, float]
    down: int
    up: int
    total_down: int
    """Up to and with this round, of the rounds that were read."""
    total_up: int
    norms: Mapping[str, float]
    cosine: float | None
    phases: Mapping[str, float]
    """Seconds by phase."""
    refused: Mapping[str, int]
    """Refused updates by reason."""
    assignments: Mapping[str, int]
    """The number of assignments by final state."""
    late: int
    """Received updates of earlier rounds."""
    digest: str
    averaged_digest: str
    """Empty: the run had no averaged model."""
    hidden: bool = False
    """Whether its clients and bytes are, which are 0 then."""

    @classmethod
    def of(cls, summary: pb.RoundSummary, before: Round | None = None) -> Self:
        """The round of a message. before: the round before it, whose totals go on."""
        account = summary.account
        down, up = (before.total_down, before.total_up) if before else (0, 0)
        return cls(
            summary.round, seconds_of(summary.committed), summary.seconds, summary.attempts,
            summary.accepted, summary.dropped,
            summary.training_loss if summary.HasField("training_loss") else None, dict(summary.metrics),
            summary.bytes_down, summary.bytes_up, down + summary.bytes_down, up + summary.bytes_up,
            dict(account.norms), account.cosine if account.HasField("cosine") else None, dict(account.seconds),
            dict(account.refused), dict(account.assignments),
            sum(number for age, number in account.staleness.items() if age), summary.model_digest,
            summary.averaged_digest, summary.cohort_hidden,
        )  # fmt: skip

    @property
    def drawn(self) -> int:
        """Clients that were drawn for it, over all attempts."""
        return self.accepted + self.dropped

    def values(self) -> dict[str, float]:
        """Its values by group and name: evaluation/accuracy, clients/accuracy_mean, norms/update, seconds/collecting.

        What is not known is left out. Trackers write these names, and tables have them as columns.
        """
        return grouped({
            **metric_groups(self.metrics),
            "training": {"loss": self.training_loss},
            "norms": {**self.norms, "cosine": self.cosine},
            "bytes": {} if self.hidden else {"down": self.down, "up": self.up},
            "seconds": {"round": self.seconds, **self.phases},
            "cohort": {
                "accepted": None if self.hidden else self.accepted,
                "dropped": None if self.hidden else self.dropped,
                "attempts": self.attempts,
                **{state: number for state, number in self.assignments.items() if state != "admitted"},
            },
        })  # fmt: skip


def metric_groups(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The server's evaluation as the group "evaluation", the clients' as "clients"."""
    return {
        "evaluation": {name: number for name, number in metrics.items() if not is_of_clients(name)},
        "clients": {name.removeprefix(BY_CLIENTS): number for name, number in metrics.items() if is_of_clients(name)},
    }


def grouped(groups: Mapping[str, Mapping[str, float | None]]) -> dict[str, float]:
    """The values that are known, as group/name; in order of names, because the maps of messages have no order."""
    return {
        f"{group}/{name}": float(number)
        for group, values in groups.items()
        for name, number in sorted(values.items())
        if number is not None
    }


def seconds_of(stamp: Timestamp) -> float:
    """Unix seconds; 0 for none."""
    return stamp.ToNanoseconds() / 1e9


def column(name: str) -> str:
    """The column of a value: evaluation/accuracy is "accuracy", norms/cosine is "norms_cosine"."""
    return name.removeprefix("evaluation/").replace("/", "_")


def last_epoch(summary: pb.RoundSummary) -> dict[str, float]:
    """The last value of each metric that clients measured in their local epochs, as training/last_epoch_loss."""
    return last_values([dict(epoch.values) for epoch in summary.local_epochs])


def last_values(epochs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The same of epochs that are no messages."""
    last: dict[str, float] = {}
    for epoch in epochs:
        last.update(epoch)
    return grouped({"training": {f"last_epoch_{name}": number for name, number in last.items()}})


def rounds_of(summaries: Iterable[pb.RoundSummary]) -> list[Round]:
    """Messages in order of rounds, with totals from the first one on."""
    rounds: list[Round] = []
    for summary in summaries:
        rounds.append(Round.of(summary, rounds[-1] if rounds else None))
    return rounds


def is_of_clients(metric: str) -> bool:
    """Whether clients measured a metric."""
    return metric.startswith(BY_CLIENTS)


def evaluation(metrics: Mapping[str, float]) -> str:
    """The server's evaluation: accuracy 96.10 %, held-out loss 0.13."""
    names = sorted((name for name in metrics if not is_of_clients(name)), key=lambda name: (name != ACCURACY, name))
    return ", ".join(f"{metric_title(name)} {measured(metrics[name], name)}" for name in names)


def spread(metrics: Mapping[str, float], metric: str) -> str:
    """Mean and deviation of a metric over clients: 81.20 ± 3.10 %. Empty: it has none."""
    mean, deviation = (metrics.get(f"{BY_CLIENTS}{metric}_{of}") for of in ("mean", "std"))
    if mean is None or deviation is None:
        return ""
    if measured(0.0, metric) == percent(0.0):
        return f"{100 * mean:.2f} ± {100 * deviation:.2f} %"
    return f"{value(mean)} ± {value(deviation)}"


def on_clients(metrics: Mapping[str, float]) -> list[str]:
    """A text for each metric that clients evaluated: accuracy 81.20 ± 3.10 %, worst tenth 70.00 %, and so on."""
    texts = []
    for own in sorted(name[len(BY_CLIENTS) : -len("_mean")] for name in metrics if _is_mean(name)):
        parts = [f"{metric_title(own) if own.startswith(OF_AVERAGED) else own} {spread(metrics, own)}"]
        for ending, words in _SUMMARIES.items():
            if (number := metrics.get(f"{BY_CLIENTS}{own}{ending}")) is not None:
                parts.append(f"{words} {measured(number, own)}")
        texts.append(", ".join(parts))
    return texts


_SUMMARIES = {"_worst_decile": "worst tenth", "_best_decile": "best tenth", "": "over all examples"}
"""Ending of a summary over clients -> its words."""


def _is_mean(name: str) -> bool:
    return is_of_clients(name) and name.endswith("_mean")


def evaluated_metrics(response: pb.ListEvaluationsResponse) -> list[str]:
    """Names of all metrics of the clients: accuracy first, then by name."""
    names = {name for row in response.evaluations for name in row.metrics}
    return sorted(names, key=lambda name: (name != ACCURACY, name))


def worst_first(response: pb.ListEvaluationsResponse) -> list[pb.ClientEvaluation]:
    """Clients by their first metric, the worst first, or the lowest first if the direction is unknown.

    Those without a value come last.
    """
    name = next(iter(evaluated_metrics(response)), "")
    having = [row for row in response.evaluations if name in row.metrics]
    ranked = sorted(having, key=lambda row: row.metrics[name], reverse=response.lower_is_better.get(name, False))
    return [*ranked, *(row for row in response.evaluations if name not in row.metrics)]


def evaluated_summary(response: pb.ListEvaluationsResponse) -> list[str]:
    """A text for each metric once the evaluation is over; before that, how many clients have evaluated it."""
    if EVALUATED in response.round.metrics:
        return on_clients(response.round.metrics)
    return [f"{counted(len(response.evaluations), 'client')} evaluated it so far, others are still expected"]


def norms(values: Mapping[str, float], cosine: float | None) -> str:
    """The norms of one round: updates 0.31 (0.2 to 0.55), step 0.21, direction 0.9, cosine 0.73."""
    if not values:
        return ""
    parts = [f"updates {update_norms(values)}"] if "update" in values else []  # secure aggregation hides them
    parts += [f"step {value(values['aggregate'])}"]
    if cosine is not None:
        parts += [f"direction {value(values['direction'])}", f"cosine {cosine:.2f}"]
    return ", ".join(parts)


def update_norms(by_kind: Mapping[str, float]) -> str:
    """Mean norm of the updates, and the range: 0.31 (0.2 to 0.55)."""
    if "update" not in by_kind:
        return ""
    mean, smallest, largest = (value(by_kind[name]) for name in ("update", "update_smallest", "update_largest"))
    return mean if smallest == largest else f"{mean} ({smallest} to {largest})"


def metric_of(stop: pb.StopSpec) -> str:
    """The metric by which a run chooses its best model."""
    return stop.metric or LOSS


def lower_is_better(stop: pb.StopSpec) -> bool:
    """The direction of that metric, which only a run with a metric of its own states."""
    return stop.lower_is_better if stop.metric else True


def shown_metric(run: pb.RunStatus) -> str:
    """The metric for the column beside the loss: the run's own, or else the accuracy, or what else the task reports."""
    metric = run.spec.stop.metric
    if metric and metric != LOSS and not is_of_clients(metric):
        return metric
    others = sorted(name for name in run.newest_metrics if name != LOSS and not name.startswith(_NOT_OWN))
    return ACCURACY if ACCURACY in others or not others else others[0]


_NOT_OWN = (BY_CLIENTS, OF_AVERAGED)
