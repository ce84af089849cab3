"""What needs attention in a federation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fl_common.units import counted
from protos.fl.v1 import admin_pb2 as pb


class Problem(NamedTuple):
    """What needs attention in a federation."""

    tone: str
    text: str
    run_id: str = ""
    """The run that has it."""
    clients: str | None = None
    """The filter of the list of clients that have it; empty: all. None: no clients have it."""
    client: str = ""
    """The client that has it, if it is one."""


def health(worst_first: Sequence[Problem]) -> tuple[str, str]:
    """Tone and words for a federation with these problems."""
    tone = worst_first[0].tone if worst_first else "good"
    return tone, {"good": "healthy", "warn": "needs attention", "bad": "in trouble"}[tone]


def waiting(overview: pb.GetOverviewResponse) -> list[Problem]:
    """The runs that wait, with what they lack."""
    return [
        Problem("warn", f"{run.run_id} waits: {run.waiting_for or run.reason or 'for clients'}", run.run_id)
        for run in overview.runs
        if run.state == pb.RUN_STATE_WAITING
    ]


_RECENT_S = 24 * 3600.0
"""A run that failed within this time is a problem of now."""


def problems(overview: pb.GetOverviewResponse, ended: Iterable[pb.RunOverview] = ()) -> list[Problem]:
    """What needs attention, the worst first. ended: runs that have ended, if the overview has only active ones."""
    now, clients = overview.now.seconds, overview.clients_by_state
    known = [
        Problem("bad", f"{run.run_id} failed: {run.reason}", run.run_id)
        for run in (*overview.runs, *ended)
        if run.state == pb.RUN_STATE_FAILED and now - run.ended.seconds < _RECENT_S
    ]
    if not_loaded := overview.runs_by_state["unspecified"]:
        known.append(Problem("bad", f"{counted(not_loaded, 'run')} could not be loaded"))
    known += waiting(overview)
    for need in overview.attention:
        text = f"{need.client_id} {need.attention.why}; {need.attention.remedy}"
        known.append(Problem("warn", text, client=need.client_id))
    if (more := clients["attention"] - len(overview.attention)) > 0:
        text = f"{counted(more, 'more client')} need{'s' if more == 1 else ''} attention"
        known.append(Problem("warn", text, clients="mark=attention"))
    if suspect := clients["suspect"]:
        text = f"{counted(suspect, 'client')} lost {'its' if suspect == 1 else 'their'} connection a moment ago"
        known.append(Problem("warn", text, clients="state=suspect"))
    if any(run.state == pb.RUN_STATE_RUNNING for run in overview.runs) and not clients["present"]:
        known.append(Problem("warn", "no client is connected", clients=""))
    return known
