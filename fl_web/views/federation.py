"""The first view: whether the federation is healthy, its runs, its clients by state, what waits and why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from fl_web.coordinator.reader import Reader, RunsWanted
from fl_web.render.formats import seconds_of
from fl_web.render.states import CLIENT_MARKS, CLIENT_STATES, RUN_STATES, run_number, run_word
from fl_web.views.estimates import left_of_overview
from fl_web.views.view import Context, Params, View
from protos.fl.v1 import admin_pb2 as pb

_ACTIVE = (pb.RUN_STATE_RUNNING, pb.RUN_STATE_WAITING, pb.RUN_STATE_PAUSED)
_ENDED = (pb.RUN_STATE_COMPLETED, pb.RUN_STATE_STOPPED, pb.RUN_STATE_FAILED)
_MOST_ACTIVE, _MOST_ENDED, _MOST_EVENTS, _READ_EVENTS = 50, 10, 12, 500
_RECENT_S = 24 * 3600.0
"""A run that failed within this time is a problem of now."""


async def _context(reader: Reader, _: Params) -> Context:
    active, ended, history = await asyncio.gather(
        reader.overview(RunsWanted(_MOST_ACTIVE, states=_ACTIVE)),
        reader.overview(RunsWanted(_MOST_ENDED, states=_ENDED)),
        reader.entries(limit=_READ_EVENTS),
    )
    problems = _problems(active, ended.runs)
    return {
        "title": "Federation",
        "overview": active,
        "active": active.runs,
        "more_active": active.runs_found - len(active.runs),
        "ended": ended.runs,
        "more_ended": ended.runs_found - len(ended.runs),
        "problems": problems,
        "health": "bad" if any(tone == "bad" for tone, _, _ in problems) else "warn" if problems else "good",
        "entries": _latest(history.entries),
        "run_states": RUN_STATES,
        "client_states": CLIENT_STATES,
        "client_marks": CLIENT_MARKS,
        "estimate": left_of_overview,
        "number": active.history_number,
    }


def _latest(entries: Sequence[pb.HistoryEntry]) -> list[pb.HistoryEntry]:
    """The newest entry of each event of a run or client, the newest first: a run commits many rounds in a row."""
    newest: dict[tuple[str, str], pb.HistoryEntry] = {}
    for entry in reversed(entries):
        newest.setdefault((entry.event, entry.subject), entry)
    return list(newest.values())[:_MOST_EVENTS]


Problem = tuple[str, str, str]
"""(tone, text, address)."""


def _problems(overview: pb.GetOverviewResponse, ended: Iterable[pb.RunOverview]) -> list[Problem]:
    """What needs attention, the worst first."""
    now, clients = seconds_of(overview.now), overview.clients_by_state
    found: list[Problem] = [
        ("bad", f"{run.run_id} failed: {run.reason}", f"/runs/{run.run_id}")
        for run in ended
        if run.state == pb.RUN_STATE_FAILED and now - seconds_of(run.ended) < _RECENT_S
    ]
    if not_loaded := overview.runs_by_state["unspecified"]:
        found.append(("bad", f"{not_loaded} runs could not be loaded", "/runs"))
    found += [
        ("warn", f"{run.run_id} waits: {run.reason or 'for clients'}", f"/runs/{run.run_id}")
        for run in overview.runs
        if run.state == pb.RUN_STATE_WAITING
    ]
    found += [
        (
            "warn",
            f"{run.run_id}: check the order of the labels of {run.labels_suspected} clients",
            f"/runs/{run.run_id}",
        )
        for run in overview.runs
        if run.labels_suspected
    ]
    found += [
        ("warn", f"{run.run_id}: {run.below_due} clients count less than half of their due", f"/runs/{run.run_id}")
        for run in overview.runs
        if run.below_due
    ]
    if quarantined := clients["quarantined"]:
        found.append(("warn", f"{quarantined} clients in quarantine", "/clients?mark=quarantined"))
    if suspect := clients["suspect"]:
        found.append(("warn", f"{suspect} clients lost their connection a moment ago", "/clients?state=suspect"))
    if any(run.state == pb.RUN_STATE_RUNNING for run in overview.runs) and not clients["present"]:
        found.append(("warn", "no client is connected", "/clients"))
    return found


async def _runs(reader: Reader, params: Params) -> Context:
    words = params.texts("state")
    states = [number for word in words if (number := run_number(word)) is not None]
    overview = await reader.overview(RunsWanted(50, params.text("page"), states, params.text("q")))
    return {
        "title": "Runs",
        "overview": overview,
        "found": overview.runs_found,
        "chosen": [run_word(state) for state in states],
        "run_states": RUN_STATES,
        "estimate": left_of_overview,
        "params": params,
        "number": overview.history_number,
    }


FEDERATION = View(
    "federation",
    "federation.html",
    _context,
    {
        "health": "federation/_health.html",
        "active": "federation/_active.html",
        "waits": "federation/_waits.html",
        "ended": "federation/_ended.html",
        "clients": "federation/_clients.html",
        "events": "federation/_events.html",
    },
    refresh_s=2.0,
)
RUNS = View("runs", "runs.html", _runs, {"list": "runs/_list.html"}, pause_s=2.0, refresh_s=5.0)
