"""Evaluation on the server's held-out data, and the metrics of all evaluations: checks, sums, and the run's own metric.

One model is evaluated at a time, in the order of the rounds, at the same time as the next round. An evaluation goes on
after the run's end. One that a restart cut short is made up from the checkpoint of its round.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog

from fl_common.units import counted
from fl_server.aggregation.engine import Engine
from fl_server.aggregation.outside_task.remote_task import RemoteTask
from fl_server.aggregation.snapshot import Snapshot
from fl_server.errors import InvalidInput
from fl_server.rounds import events as ev
from fl_server.rounds.metrics import (
    AVERAGED,
    LOSS,
    PREFIX,
    STATISTICS,
    WITHOUT_PERSONAL,
    Directions,
    as_averaged,
    by_clients,
    of_averaged,
    reported_metrics,
    with_pooled,
)
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.progress import Progress
from fl_server.run_settings.config import RunConfig
from fl_server.services import Place
from fl_server.store.records import CommitRecord
from fl_tasks import TaskError
from fl_tasks.evaluation import EvaluationLeft
from fl_tasks.metrics import MAX_METRICS, wrong_name
from fl_tasks.summed_metrics import MAX_SUM_VALUES, PlainSum, Pool, without_personal
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()
Evaluated = tuple[Engine, Snapshot]
MAX_SUM = 1e100
"""A larger number is no sum, and those of many clients would not be finite."""
MAX_DIMENSIONS = 8
_AT_ONCE = 64
"""Clients whose sums are in memory."""
MAX_VALUE = 1e100
"""A larger value is no measurement, and its square would not be finite."""


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


def check_sums(request: pb.ReportEvaluationRequest, *, personal: bool) -> None:
    """Raises InvalidInput for sums that no device sends. personal: whether the run has personal parameters."""
    for field, sums in (("sums", request.sums), ("sums_without_personal", request.sums_without_personal)):
        if (count := sum(len(summed.values) for summed in sums)) > MAX_SUM_VALUES or len(sums) > MAX_SUM_VALUES:
            raise InvalidInput(field, f"at most {MAX_SUM_VALUES:,} numbers", f"{max(count, len(sums)):,}")
        for number, summed in enumerate(sums):
            _check_sum(f"{field}[{number}]", summed)
        names = [(summed.metric, summed.name) for summed in sums]
        if len(set(names)) < len(names):
            raise InvalidInput(field, "each sum once", "one of them twice")
    expected = [_kind(summed) for summed in request.sums] if personal else []
    if [_kind(summed) for summed in request.sums_without_personal] != expected:
        raise InvalidInput("sums_without_personal", f"{len(expected)} sums, those of `sums`", "others")


def plain_sums(request: pb.ReportEvaluationRequest) -> list[PlainSum]:
    """The sums of a report as they are stored."""
    return [*map(_plain, request.sums), *without_personal(map(_plain, request.sums_without_personal))]


async def with_sums(
    context: RunContext, control: RunControl, round_: int, summary: Mapping[str, float]
) -> dict[str, float]:
    """The summary of a round's evaluations with the values that the sums of all clients have."""
    pool, after, ledger = Pool(), "", context.services.ledger
    read = context.store.evaluation_sums
    while page := await control.retry(lambda: ledger.do(read, context.run_id, round_, after, _AT_ONCE)):  # noqa: B023 - awaited here
        for _, sums in page:
            pool.add(sums)
        after = page[-1][0]
    values, problems = await context.services.in_building(_values, pool, context.task_code)
    if problems or pool.left_out:
        log.warning("sums_not_used", run=context.run_id, round=round_, clients=pool.left_out, problems=problems)
    return with_pooled(summary, pool.metrics, values)


def _values(pool: Pool, task: object) -> tuple[dict[str, float], list[str]]:
    return task.pooled(pool) if isinstance(task, RemoteTask) else pool.values(task)


def _check_sum(field: str, given: pb.MetricSum) -> None:
    for name in (given.metric, given.name):
        if (rule := wrong_name(name)) is not None:
            raise InvalidInput(field, rule, repr(name[:100]))
    if len(given.shape) > MAX_DIMENSIONS or math.prod(given.shape) != len(given.values):
        came = f"the shape {list(given.shape)[:MAX_DIMENSIONS]} and {counted(len(given.values), 'value')}"
        raise InvalidInput(field, f"at most {MAX_DIMENSIONS} dimensions, and as many values as the shape has", came)
    if bad := [value for value in given.values if not abs(value) <= MAX_SUM]:
        raise InvalidInput(field, f"finite values, at most {MAX_SUM:g} in size", bad[0])


def _kind(given: pb.MetricSum) -> tuple[str, str, Sequence[int]]:
    return given.metric, given.name, list(given.shape)


def _plain(given: pb.MetricSum) -> PlainSum:
    return given.metric, given.name, list(given.shape), list(given.values)


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
    return [f"{PREFIX}{name}{end}" for name in own for end in ("", *(f"_{ending}" for ending in STATISTICS.values()))]


def check_report(request: pb.ReportEvaluationRequest, config: RunConfig) -> None:
    """Raises InvalidInput for a report that no device sends."""
    personal, averaged = bool(config.personal), config.evaluation.averaged_on_clients
    most = MAX_METRICS * (1 + averaged)
    if not 0 < request.num_examples < 2**63:
        raise InvalidInput("num_examples", "1 or more", request.num_examples)
    if not (request.metrics or request.sums) or len(request.metrics) > most:
        raise InvalidInput("metrics", f"1 to {counted(most, 'metric')}", f"{len(request.metrics)}")
    if not averaged:
        _check_committed([*request.metrics, *(summed.metric for summed in request.sums)])
    check_sums(request, personal=personal)
    check_values("metrics", request.metrics)
    expected = request.metrics.keys() if personal else set[str]()
    if request.without_personal.keys() != expected:
        names = ", ".join(sorted(expected)) or "nothing, because the run has no personal parameters"
        came = ", ".join(sorted(request.without_personal)) or "nothing"
        raise InvalidInput("without_personal", names, came[:200])
    check_values("without_personal", request.without_personal)


def _check_committed(names: Iterable[str]) -> None:
    if (name := next(filter(of_averaged, names), None)) is not None:
        expected = "metrics of the committed model: the run has no evaluation.averaged_on_clients"
        raise InvalidInput("metrics", expected, repr(name[:100]))


def check_values(field: str, metrics: Mapping[str, float]) -> None:
    """Raises InvalidInput for names or values that no device sends."""
    for name, value in metrics.items():
        if (rule := wrong_name(name)) is not None:
            raise InvalidInput(field, rule, repr(name[:100]))
        if not (math.isfinite(value) and abs(value) <= MAX_VALUE):
            raise InvalidInput(f"{field}[{name!r}]", f"a finite value, at most {MAX_VALUE:g} in size", value)
