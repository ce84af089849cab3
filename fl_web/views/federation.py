"""The first view: is it healthy, what is it waiting for, which client is bad, is the model getting better."""

from __future__ import annotations

import asyncio

from fl_web.coordinator.reader import Reader
from fl_web.facts.federation import Problem, health, problems, waiting
from fl_web.facts.words import CLIENT_MARKS, CLIENT_STATES, RUN_STATES, run_number, run_state, without_repeats
from fl_web.views.view import Context, Params, View
from protos.fl.v1 import admin_pb2 as pb

_ACTIVE = (pb.RUN_STATE_RUNNING, pb.RUN_STATE_WAITING, pb.RUN_STATE_PAUSED)
_ENDED = (pb.RUN_STATE_COMPLETED, pb.RUN_STATE_STOPPED, pb.RUN_STATE_FAILED)
_MOST_ACTIVE, _MOST_ENDED, _MOST_EVENTS, _READ_EVENTS = 50, 8, 6, 500
_MOST_CARDS, _MOST_WAITS, _MOST_SLOWEST = 6, 8, 5


async def _context(reader: Reader, _: Params) -> Context:
    active, ended, history, by_failures, by_delay = await asyncio.gather(
        reader.overview(_MOST_ACTIVE, states=_ACTIVE),
        reader.overview(_MOST_ENDED, states=_ENDED),
        reader.entries(limit=_READ_EVENTS),
        reader.clients(_largest(pb.CLIENT_ORDER_FAILED_SHARE, 2)),
        reader.clients(_largest(pb.CLIENT_ORDER_LAST_SHARE, _MOST_SLOWEST)),
    )
    worst_first = problems(active, ended.runs)
    elsewhere = {problem.text for problem in waiting(active)}
    suspects = {client.client_id: client for client in (*by_failures.clients, *by_delay.clients)}
    return {
        "title": "Federation",
        "overview": active,
        "active": active.runs,
        "cards": [run for run in active.runs if run.points],
        "most_cards": _MOST_CARDS,
        "most_waits": _MOST_WAITS,
        "slowest": [client for client in suspects.values() if client.work.assignments][:_MOST_SLOWEST],
        "more_active": active.runs_found - len(active.runs),
        "ended": ended.runs,
        "more_ended": ended.runs_found - len(ended.runs),
        "problems": [
            (problem.tone, problem.text, _address(problem))
            for problem in worst_first
            if problem.text not in elsewhere and not problem.client
        ],
        "health": health(worst_first),
        "entries": without_repeats(history.entries, _MOST_EVENTS),
        "run_states": RUN_STATES,
        "client_states": CLIENT_STATES,
        "client_marks": CLIENT_MARKS,
        "number": active.history_number,
    }


def _largest(order: pb.ClientOrder, most: int) -> pb.ListClientsRequest:
    return pb.ListClientsRequest(page_size=most, order=order, descending=True)


def _address(problem: Problem) -> str:
    """The page that shows a problem."""
    if problem.run_id:
        return f"/runs/{problem.run_id}"
    return "/runs" if problem.clients is None else f"/clients?{problem.clients}"


async def _runs(reader: Reader, params: Params) -> Context:
    words = params.texts("state")
    states = [number for word in words if (number := run_number(word)) is not None]
    overview = await reader.overview(50, params.text("page"), states, params.text("q"))
    return {
        "title": "Runs",
        "overview": overview,
        "found": overview.runs_found,
        "chosen": [run_state(state) for state in states],
        "run_states": RUN_STATES,
        "params": params,
        "number": overview.history_number,
    }


FEDERATION = View("federation", _context, ("health", "waits", "attention", "runs", "events"), refresh_s=2.0)
RUNS = View("runs", _runs, ("list",), pause_s=2.0, refresh_s=5.0)
