"""What follows an evaluation of a committed model, whoever made it: it is kept, told, and may end the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from fl_server import events as ev
from fl_server.ledger import until_room
from fl_server.progress import Progress
from fl_server.stop_rules import StopPolicy, stop_reason

if TYPE_CHECKING:
    from fl_server.run import Run

log = structlog.get_logger()


async def settle(run: Run, round_: int, metrics: Mapping[str, float], by: ev.Source) -> None:
    """Enter metrics of a committed round beside those that another evaluation gave it; go on, or end the run."""
    record = run.log.evaluated(round_, metrics)
    await _write(run, round_)
    if not all(map(math.isfinite, metrics.values())):
        run.parts.metrics.not_finite.labels(run.id).inc()
    shown = {name: round(value, 5) for name, value in metrics.items()}
    log.info("round_evaluated", **{"run": run.id, "round": round_, "by": by, **shown})
    run.watchers.tell(Progress("evaluated", commit=record))
    if run.ended:
        return
    if (reason := reason_to_stop(run)) is not None:
        run.post(ev.EndRequested("completed", reason))
    # An evaluation that ran beside later rounds is not the one that a run waits for at its end.
    if round_ + 1 == run.state.round:
        run.post(ev.Evaluated(by))


async def _write(run: Run, round_: int) -> None:
    ledger = run.parts.ledger
    # Looked up at each try: while the disk was full another evaluation may have come, which must not be overwritten.
    await until_room(
        run.no_room, lambda: ledger.do(ledger.store.set_metrics, run.id, round_, run.log.commits[round_].metrics)
    )


async def prune(run: Run) -> None:
    """Keep the latest few checkpoints, the best one, and what may yet become it.

    An evaluation that is over may have named another best one. Where no commit will tidy up behind it, it does so.
    """
    await run.model.prune(run.log, run.config.keep_checkpoints)


def reason_to_stop(run: Run) -> str | None:
    """Why the run has learned enough, by its evaluations since it was created or extended; None if it goes on."""
    stop = run.config.stop
    policy = StopPolicy(stop.metric, stop.target, stop.patience)
    if not policy.looks_at_metrics:
        return None
    return stop_reason(policy, [entry for entry in run.log.evaluations if entry[0] >= run.record.extended_at])
