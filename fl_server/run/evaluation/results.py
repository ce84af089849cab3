"""What follows an evaluation of a committed model: its metrics are stored and published, and it may end the run."""

from __future__ import annotations

import math
from collections.abc import Mapping

import structlog

from fl_server.rounds import events as ev
from fl_server.run.committed.lookup import committed_round
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.progress import Progress
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
    control.post(ev.Evaluated(by, round_, metrics))


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
