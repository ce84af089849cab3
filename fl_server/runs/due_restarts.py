"""States that were reported as lost while it was too early for a restart: when that comes after all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fl_server import events as ev

if TYPE_CHECKING:
    from fl_server.run import Run


def restart_if_due(run: Run, *, at_once: bool = False) -> None:
    """Restart the states for those that were lost meanwhile, if it is time for that.

    at_once: the run lacks clients, and those that wait for the restart may be the ones.
    """
    states, epoch = run.client_states, run.record.state_epoch
    if not run.behaviour.algorithm.needs_population or not (waiting := states.waiting(epoch)):
        return
    helps = any(not states.too_often(each) for each in waiting)
    if states.may_restart(run.log.commits, epoch) or (at_once and helps):
        first = waiting[0]
        more = f", and {len(waiting) - 1} more" if len(waiting) > 1 else ""
        run.post(ev.StatesLost(f"{first.client_id}: {first.reason}{more}", epoch))
