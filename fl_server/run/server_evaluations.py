"""Evaluation on the server's held-out data, at the same time as the next round. No event of the run waits for it.

One model is evaluated at a time, in the order of the rounds. An evaluation goes on after the run's end. One that a
restart cut short is made up from the checkpoint of its round.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

import structlog

from fl_server.aggregation.engine import Engine
from fl_server.aggregation.snapshot import Snapshot
from fl_server.rounds import events as ev
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.progress import Progress
from fl_server.services import Place
from fl_server.store.records import CommitRecord
from fl_tasks import TaskError
from fl_tasks.evaluation import EvaluationLeft

log = structlog.get_logger()

Evaluated = tuple[Engine, Snapshot]


class ServerEvaluations:
    """The server's evaluations of one run. Lives on the event loop."""

    def __init__(self, context: RunContext, control: RunControl) -> None:
        self._context, self._control = context, control
        self._task: asyncio.Task[None] | None = None
        """The newest evaluation; the ones before it are done first."""

    @property
    def under_way(self) -> bool:
        """Whether a model is evaluated now."""
        return self._task is not None and not self._task.done()

    @property
    def waits_for(self) -> str:
        """Why an evaluation of the run does not begin; empty if none waits for another run's."""
        return self._context.services.slots.waits_for(self._context.run_id)

    def start(self) -> None:
        """Evaluate the latest model, after an evaluation that is still under way."""
        model = self._context.model
        self._begin(model.snapshot.round, (model.engine, model.snapshot))

    def make_up(self, round_: int) -> None:
        """Evaluate the model of an earlier round from its checkpoint, if that is kept."""
        self._begin(round_)

    async def finish(self) -> None:
        """Wait for the evaluations under way."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _begin(self, round_: int, model: Evaluated | None = None) -> None:
        """model: None to read it from its checkpoint."""
        self._context.rounds.being_evaluated[round_] += 1  # its checkpoint is kept
        before = self._task if self.under_way else None
        self._task = self._control.spawn(self._evaluate(round_, model, before))

    async def _metrics(self, place: Place, engine: Engine, snapshot: Snapshot) -> dict[str, float]:
        """The metrics of the committed model, and of the averaged one if there is one."""
        metrics = await self._limited(place, engine, snapshot)
        if snapshot.averaged is not None:
            metrics |= await self._limited(place, engine, snapshot, averaged=True)
        return metrics

    async def _limited(
        self, place: Place, engine: Engine, snapshot: Snapshot, *, averaged: bool = False
    ) -> dict[str, float]:
        """One evaluation, which has limits.evaluation_s."""
        services = self._context.services
        place.engine = engine
        most = services.config.limits.evaluation_s
        why = f"the evaluation did not end within {most:g} s (limits.evaluation_s)"
        limit = asyncio.get_running_loop().call_later(most, engine.model.leave_evaluation, why)
        try:
            evaluate = engine.model.evaluate_averaged if averaged else engine.model.evaluate
            return await services.in_evaluations(evaluate, snapshot)
        finally:
            limit.cancel()
            place.engine = None

    def _failed(self, round_: int, error: TaskError) -> None:
        log.error("evaluation_failed", run=self._context.run_id, round=round_, error=str(error), exc_info=error)
        self._control.fail(f"evaluation of round {round_} failed: {error}")

    async def _evaluate(self, round_: int, model: Evaluated | None, before: asyncio.Task[None] | None) -> None:
        context = self._context
        if before is not None:
            await asyncio.wait([before])
        async with context.services.slots.place(context.run_id, over=self._control.ended) as place:
            try:
                model = model or await context.model.kept(self._control.config, round_)
                metrics = None if model is None else await self._metrics(place, *model)
            except EvaluationLeft as left:
                metrics = None
                if not self._control.ended:
                    self._failed(round_, left)
                    return
                log.info("evaluation_left", run=context.run_id, round=round_, reason=str(left))
            except TaskError as error:
                self._failed(round_, error)
                return
        if metrics is not None:
            await record_metrics(context, self._control, round_, metrics, "server")
        context.rounds.being_evaluated[round_] -= 1
        if self._control.ended:
            await prune_checkpoints(context, self._control)


async def record_metrics(  # noqa: PLR0913, PLR0917 - the run, and what an evaluation consists of
    context: RunContext, control: RunControl, round_: int, metrics: Mapping[str, float], by: ev.Source
) -> None:
    """Add the metrics of an evaluation to a committed round; continue or end the run."""
    commit = await control.retry(lambda: context.commit_of(round_))
    if commit is None:
        raise RuntimeError(f"expected a committed round, got round {round_} of {context.rounds.committed}")
    record = context.rounds.add_metrics(commit, metrics)
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
            context.store.set_metrics, context.run_id, round_, context.rounds.recent.get(round_, record).metrics
        )
    )


async def prune_checkpoints(context: RunContext, control: RunControl) -> None:
    """Keep the latest checkpoints, the best one, and those that may become the best."""
    await context.model.prune(context.rounds, control.config.keep_checkpoints)
