"""The metric by which a run chooses its best model, as the coordinator states it, and the metric that tables show."""

from __future__ import annotations

from fl_server.rounds.client_metrics import by_clients
from fl_server.rounds.directions import LOSS, Criterion, of_averaged
from protos.fl.v1 import admin_pb2

ACCURACY = "accuracy"


def criterion_of(stop: admin_pb2.StopSpec) -> Criterion:
    """The metric and its direction, which only a run with a metric of its own states."""
    return Criterion(stop.metric, stop.lower_is_better) if stop.metric else Criterion()


def shown_metric(run: admin_pb2.RunStatus) -> str:
    """The metric for the column beside the loss: the run's own, or else the accuracy, or what else the task reports."""
    metric = run.spec.stop.metric
    if metric and metric != LOSS and not by_clients(metric):
        return metric
    own = (name for name in run.newest_metrics if not by_clients(name) and not of_averaged(name))
    others = sorted(name for name in own if name != LOSS)
    return ACCURACY if ACCURACY in others or not others else others[0]
