"""A run with a buffer whose coordinator and daemons are killed: the order in its ledger makes the same models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.federation import Fleet
from tests.processes.process import HERE
from tests.processes.simulated import check_replay

BUFFER: dict[str, Any] = {
    "algorithm": {"name": "fedcm", "parameters": {"alpha": 0.2}},
    "round": {"close": "buffer", "goal": 2, "concurrency": 3, "max_staleness": 3, "stale_direction": "sent"},
    "stop": {"rounds": 6},
}


def test_a_killed_run_with_a_buffer_is_replayed_to_the_same_bits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL for the coordinator after the second and the fourth commit, in the middle of its clients' work."""
    monkeypatch.syspath_prepend(HERE)
    server = fleet.server
    run = server.create("buffered", **BUFFER)
    for committed in (2, 4):
        with server.admin() as admin:
            for status in admin.runs.watch_run(run):
                if status.run.rounds_done >= committed:
                    server.kill()
                    break
        server.serve()
    assert len(server.digests(run)) == 6
    check_replay(server, run)
