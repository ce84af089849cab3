"""The demo's third part: a client with far too large updates is refused, and one that fails is named with its error."""

from __future__ import annotations

import time

from fl_ops.demo.fleet import CHECKED, Fleet, OnProgress
from fl_ops.demo.settings import EXAGGERATING, FAILING, DemoSettings
from fl_ops.errors import Refused
from protos.run_file import parse_run

_ROUNDS, _WAIT_S, _POLL_S = 2, 60.0, 0.1
_MOST_NORM = 5.0
"""Largest update that counts; those of one honest step are far below it."""


def show_faults(fleet: Fleet, settings: DemoSettings, on_progress: OnProgress) -> list[str]:
    """Train with the two faulty clients. Returns a sentence for each; none for another task than the demo's."""
    if not settings.tuned or settings.clients < len(CHECKED):
        return []
    on_progress("two faulty daemons join: one sends far too large updates, one fails in training")
    for name in (EXAGGERATING, FAILING):
        fleet.start_faulty(name)
    content = {
        "name": "faulty-clients",
        "seed": settings.seed,
        "task": {"name": settings.task},
        "algorithm": {"name": "fedavg"},
        "labels": {"demo": "checked"},
        "local": {"learning_rate": 0.1, "steps": 1, "batch_size": 16},
        "round": {"clients_per_round": 4, "min_clients": 4, "min_accepted": 1, "max_update_norm": _MOST_NORM},
        "stop": {"rounds": _ROUNDS},
    }
    ends = time.monotonic() + _WAIT_S
    with fleet.connect() as client:
        run_id = client.runs.create_run(parse_run(content)).run.run_id
        while client.runs.get_run(run_id, 0).run.rounds_done < _ROUNDS:
            fleet.check()
            if time.monotonic() > ends:
                raise Refused(f"the run with faulty clients did not end within {_WAIT_S:g} s: see the logs")
            time.sleep(_POLL_S)
        work = {row.client_id: row.work for row in client.clients.list_clients()}
    bad, failing = work[EXAGGERATING], work[FAILING]
    refusal, failure = bad.last_refusal, failing.last_failure
    sentences = [
        f"{EXAGGERATING} was refused {bad.refused} of {bad.assignments} times ({refusal.cause}): {refusal.message}",
        f"{FAILING} failed {failing.failed} of {failing.assignments} times: {failure.message or failure.cause}",
    ]
    for sentence in sentences:
        on_progress(sentence)
    return sentences
