"""What follows an evaluation of a committed model: its metrics are stored and published, and it may end the run."""

from __future__ import annotations

import math
from collections.abc import Mapping

import structlog

from fl_server.errors import InvalidInput
from fl_server.rounds import events as ev
from fl_server.rounds.client_metrics import EVALUATED, by_clients
from fl_server.rounds.directions import of_averaged
from fl_server.rounds.stop_rules import stop_reason
from fl_server.runs.committed.lookup import committed_round
from fl_server.runs.context import RunContext
from fl_server.runs.control import RunControl
from fl_server.runs.evaluation.criterion import check_reported
from fl_server.runs.progress import Progress
from fl_server.store.records import CommitRecord

log = structlog.get_logger()


async def record_metrics(  # noqa: PLR0913, PLR0917 - the run, and what an evaluation consists of
    context: RunContext, control: RunControl, round_: int, metrics: Mapping[str, float], by: ev.Source
) -> None:
    """Add the metrics of an evaluation to a committed round; continue or end the run."""
    commit = await control.retry(lambda: committed_round(context, round_))
    if commit is None:
        raise RuntimeError(f"expected a committed round, got round {round_} of {context.log.rounds}")
    record = context.log.add_metrics(commit, metrics)
    await _write(context, control, record)
    if not all(map(math.isfinite, metrics.values())):
        context.metrics.not_finite.labels(context.run_id).inc()
    shown = {name: round(value, 5) for name, value in metrics.items()}
    # In one field: a task may name a metric as it likes, "event" and "run" too.
    log.info("round_evaluated", run=context.run_id, round=round_, by=by, metrics=shown)
    context.watchers.publish(Progress("evaluated", commit=record))
    if control.ended:
        return
    if (missing := _metric_missing(context, control, metrics, by)) is not None:
        control.fail(missing)
        return
    if (reason := reason_to_stop(context, control)) is not None:
        control.post(ev.EndRequested("completed", reason))
    control.post(ev.Evaluated(by, round_))


def _metric_missing(
    context: RunContext, control: RunControl, metrics: Mapping[str, float], by: ev.Source
) -> str | None:
    """Why the run cannot go on: the first evaluation lacks the metric of its rule. None: it can."""
    config, metric = control.config, control.config.stop.metric
    clients = metrics.get(EVALUATED, 0.0)
    from_here = clients > 0 if by_clients(metric) else by == "server"
    if of_averaged(metric) and not any(map(of_averaged, metrics)):
        from_here = False  # the round is before the first averaged model
    if not from_here or not config.stops_by_metric or context.log.newest_round_with(metric) is not None:
        return None
    try:
        check_reported(metric, [name for name in metrics if name != EVALUATED])
    except InvalidInput as error:
        return str(error)
    return None


async def _write(context: RunContext, control: RunControl, record: CommitRecord) -> None:
    ledger, round_ = context.services.ledger, record.round
    # Read from the log at each try: during a write failure the other evaluation may have added its metrics.
    await control.retry(
        lambda: ledger.do(
            context.store.set_metrics, context.run_id, round_, context.log.recent.get(round_, record).metrics
        )
    )


async def prune_checkpoints(context: RunContext, control: RunControl) -> None:
    """Keep the latest checkpoints, the best one, and those that may become the best."""
    await context.model.prune(context.log, control.config.keep_checkpoints)


def reason_to_stop(context: RunContext, control: RunControl) -> str | None:
    """Why the evaluations since the run was created or extended end it; None if it goes on."""
    policy = control.config.stop.policy
    if not policy.uses_metrics:
        return None
    return stop_reason(policy, *context.log.evaluations(control.record.extended_at))
