"""Restores the evaluations that a restart cut short, or that the end of a run did."""

from __future__ import annotations

from dataclasses import replace

from fl_server.rounds import events as ev
from fl_server.rounds.client_metrics import has_evaluation
from fl_server.rounds.committing import clients_due, evaluation_due
from fl_server.rounds.directions import PREFIX
from fl_server.rounds.restoring import with_evaluations
from fl_server.run.committed.lookup import committed_round
from fl_server.run.deadline import time_after_restart
from fl_server.run.run import Run

_MADE_UP = 2
"""Most evaluations of earlier rounds that were under way or waiting when the coordinator stopped."""


async def restore_evaluations(run: Run) -> None:
    """Start evaluations of the latest round again that the crash cut short, or end the run as they demand."""
    await run.client_evaluations.backfill()
    latest, state = run.log.latest, run.state
    if latest is None:
        return
    server = evaluation_due(state, latest.round) and not has_evaluation(latest.metrics, "")
    clients = clients_due(state, latest.round) and not has_evaluation(latest.metrics, PREFIX)
    missing: set[ev.Source] = {*(("server",) if server else ()), *(("clients",) if clients else ())}
    run.state = with_evaluations(state, *run.log.evaluations(run.record.extended_at), missing)
    for earlier in await _not_evaluated(run):
        run.server_evaluation.make_up(earlier)
    if clients:
        whole = run.config.evaluation.clients_deadline_s
        seconds = time_after_restart(run.context, whole, latest.clients_seconds_left)
        await run.client_evaluations.start(latest.round, seconds)
    if server:
        run.server_evaluation.start()


async def make_up_last_evaluations(run: Run) -> None:
    """Evaluate the last models whose evaluations were under way or waiting when the run ended, and then cut short."""
    latest, before = run.log.latest, replace(run.state, ending=None)
    last = latest and evaluation_due(before, latest.round) and not has_evaluation(latest.metrics, "")
    for round_ in (*await _not_evaluated(run), *([latest.round] if latest and last else [])):
        run.server_evaluation.make_up(round_)


async def _not_evaluated(run: Run) -> list[int]:
    """Rounds before the latest one whose evaluation by the server was due and did not end before the restart."""
    every, missing, latest = run.state.policy.evaluate_every, list[int](), run.log.latest
    newest = latest.round // every * every - 1 if latest and every else -1
    for round_ in range(newest, -1, -every)[:_MADE_UP] if every else ():
        commit = await committed_round(run.context, round_)
        if commit is None or has_evaluation(commit.metrics, ""):
            break
        missing.insert(0, round_)
    return missing
