"""The metric by which a run chooses its best model: its direction, and whether the task reports it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fl_server.errors import InvalidInput
from fl_server.rounds.client_metrics import by_clients
from fl_server.rounds.directions import AVERAGED, LOSS, PREFIX, WITHOUT_PERSONAL, Directions, as_averaged
from fl_server.rounds.stop_rules import reported_metrics
from fl_server.run_config import RunConfig

"""Names in a message."""


def directions_of(config: RunConfig, declared: Mapping[str, bool]) -> Directions:
    """The directions that the run's file and its task state. declared: of the task."""
    stop = config.stop
    own = {} if stop.lower_is_better is None else {stop.metric: stop.lower_is_better}
    return Directions({**declared, **own})


def with_direction(config: RunConfig, directions: Directions) -> RunConfig:
    """The configuration with the direction of its metric, as it is stored and shown; unchanged if it is unknown."""
    known = directions.lower_is_better(config.stop.metric)
    return config.model_copy(update={"stop": config.stop.model_copy(update={"lower_is_better": known})})


def check_metric(config: RunConfig, names: Collection[str] | None) -> None:
    """Raises InvalidInput for a metric that the task does not report, or whose direction is unknown.

    config: of `with_direction`. names: of the task's metrics; None if they are not known before the first evaluation.
    """
    metric, evaluation = config.stop.metric, config.evaluation
    evaluated = evaluation.clients_every if by_clients(metric) else evaluation.every
    if names is not None and evaluated and needs_metric(config):
        check_reported(metric, _reported(config, names))
    if config.stop.lower_is_better is None:
        own = metric.removeprefix(PREFIX).removeprefix(AVERAGED)
        raise InvalidInput(
            "stop.metric",
            "a metric whose direction is known: set stop.lower_is_better to true or false, or declare it in the task,"
            f' as in declared_metrics = (Metric("{own}", lower_is_better=True),)',
            metric,
        )


def needs_metric(config: RunConfig) -> bool:
    """Whether the run cannot do without its metric: it was named, or a rule reads it. Nobody names the default."""
    return config.stops_by_metric or config.stop.metric != LOSS


def check_reported(metric: str, names: Collection[str]) -> None:
    """Raises InvalidInput for a metric that is not among those reported."""
    if metric not in names:
        raise InvalidInput("stop.metric", reported_metrics(metric, names), metric)


def _reported(config: RunConfig, names: Collection[str]) -> list[str]:
    clients = by_clients(config.stop.metric)
    if config.evaluation.averaged_on_clients if clients else config.averaging is not None:
        names = [*names, *as_averaged(dict.fromkeys(names, 0.0))]
    if not clients:
        return [*names]
    own = [name + ending for name in names for ending in ("", WITHOUT_PERSONAL)[: 2 if config.personal else 1]]
    return [f"{PREFIX}{name}{ending}" for name in own for ending in ("_mean", "", "_std", "_worst_decile")]
