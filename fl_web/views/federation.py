"""The first view: whether the federation is healthy, its runs, its clients by state, what waits and why."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fl_web.coordinator.reader import Reader, RunsWanted
from fl_web.facts.federation import Problem, problems
from fl_web.facts.words import CLIENT_MARKS, CLIENT_STATES, RUN_STATES, run_number, run_state
from fl_web.views.view import Context, Params, View
from protos.fl.v1 import admin_pb2 as pb

_ACTIVE = (pb.RUN_STATE_RUNNING, pb.RUN_STATE_WAITING, pb.RUN_STATE_PAUSED)
_ENDED = (pb.RUN_STATE_COMPLETED, pb.RUN_STATE_STOPPED, pb.RUN_STATE_FAILED)
_MOST_ACTIVE, _MOST_ENDED, _MOST_EVENTS, _READ_EVENTS = 50, 10, 12, 500


async def _context(reader: Reader, _: Params) -> Context:
    active, ended, history = await asyncio.gather(
        reader.overview(RunsWanted(_MOST_ACTIVE, states=_ACTIVE)),
        reader.overview(RunsWanted(_MOST_ENDED, states=_ENDED)),
        reader.entries(limit=_READ_EVENTS),
    )
    worst_first = problems(active, ended.runs)
    return {
        "title": "Federation",
        "overview": active,
        "active": active.runs,
        "more_active": active.runs_found - len(active.runs),
        "ended": ended.runs,
        "more_ended": ended.runs_found - len(ended.runs),
        "problems": [(problem.tone, problem.text, _address(problem)) for problem in worst_first],
        "health": worst_first[0].tone if worst_first else "good",
        "entries": _latest(history.entries),
        "run_states": RUN_STATES,
        "client_states": CLIENT_STATES,
        "client_marks": CLIENT_MARKS,
        "number": active.history_number,
    }


def _latest(entries: Sequence[pb.HistoryEntry]) -> list[pb.HistoryEntry]:
    """The newest entry of each event of a run or client, the newest first: a run commits many rounds in a row."""
    newest: dict[tuple[str, str], pb.HistoryEntry] = {}
    for entry in reversed(entries):
        newest.setdefault((entry.event, entry.subject), entry)
    return list(newest.values())[:_MOST_EVENTS]


def _address(problem: Problem) -> str:
    """The page that shows a problem."""
    if problem.run_id:
        return f"/runs/{problem.run_id}"
    return "/runs" if problem.clients is None else f"/clients?{problem.clients}"


async def _runs(reader: Reader, params: Params) -> Context:
    words = params.texts("state")
    states = [number for word in words if (number := run_number(word)) is not None]
    overview = await reader.overview(RunsWanted(50, params.text("page"), states, params.text("q")))
    return {
        "title": "Runs",
        "overview": overview,
        "found": overview.runs_found,
        "chosen": [run_state(state) for state in states],
        "run_states": RUN_STATES,
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
