"""The values of a run's gauges."""

from __future__ import annotations

from fl_server.metrics.runs import RunFigures
from fl_server.run.committed.totals import criteria
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl


def run_figures(context: RunContext, control: RunControl) -> RunFigures:
    """The values of a run's gauges. Also called in a scraper's thread: it reads only values that are never changed."""
    config, state, log, status = control.config, control.state, context.log, control.run_status
    latest, section = log.latest, config.round
    statistics, summed = log.latest_statistics, context.algorithm.needs_population and not control.ended
    return RunFigures(
        name=config.name or config.base_id(),
        algorithm=config.algorithm.name,
        task=config.task.name,
        state=status.current,
        state_since=control.record.ended_at or status.since,
        cannot_write=bool(status.write_failure or status.upload_failure),
        rounds=log.rounds,
        planned_rounds=state.rounds,
        clients_per_round=section.clients_per_round if section.sampling == "fixed" else None,
        eligible=0 if control.ended else sum(not state.barred(client) for client in state.eligible),
        over_selection=state.draws_per_update,
        deadline_s=section.deadline_s,
        last_commit=latest.committed_at if latest else None,
        training_loss=latest.training_loss if latest else None,
        newest_metrics=log.newest_metrics(),
        best_metrics={
            (criterion.metric, "lower" if criterion.lower_is_better else "higher"): values[criterion.metric].value
            for values in [log.best_values()]
            for criterion in criteria(log.criterion)
            if criterion.metric in values
        },
        state_members=len(context.client_states.members) if summed else 0,
        missing_members=len(context.client_states.missing),
        left_out=0 if control.ended else len(context.client_states.left_out),
        refusing=0 if control.ended else len(context.fleet.eligibility.policy.of(context.run_id)),
        below_due=len(log.shares.too_low),
        shares=log.shares.spread,
        norms=statistics.norms,
        cosine=statistics.cosine,
    )
