"""Runs whose parameters follow schedules: killed, extended, simulated and replayed, with the same models."""

from __future__ import annotations

from typing import Any

import pytest

from protos.fl.v1 import admin_pb2
from tests.integration.runs.test_simulation import simulated
from tests.processes.federation import Fleet
from tests.processes.process import HERE
from tests.processes.simulated import replay, simulated_digests

METHODS: dict[str, dict[str, Any]] = {
    "mofedsam": {
        "parameters": {"beta": 0.2, "rho": 0.1},
        "schedules": {
            "beta": {"kind": "linear", "end": 1.0},
            "rho": {"kind": "cosine", "end": 0.0},
            "eta_g": {"kind": "step", "milestones": [1, 3], "factor": 0.7},
        },
    },
    "mime": {"parameters": {"beta": 0.7}, "schedules": {"beta": {"kind": "cosine", "end": 0.1}}},
}


@pytest.fixture(autouse=True)
def _task_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the daemons' task importable here."""
    monkeypatch.syspath_prepend(HERE)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_and_extended_run_is_the_simulated_one(fleet: Fleet, method: str) -> None:
    """SIGKILL in the third of four rounds, then two rounds more, which keep the values of the last planned one.

    The models are those of an undisturbed simulation and of a replay, and not those of a run without schedules.
    """
    name = f"scheduled-{method}"
    algorithm = {"name": method, **METHODS[method]}
    fleet.hold()
    fleet.server.create(name, algorithm=algorithm, stop={"rounds": 4})
    with fleet.server.admin() as admin:
        for status in admin.runs.watch_run(name):
            fleet.release()  # not before the events are watched
            if status.event == "committed" and status.run.rounds_done == 2:
                break
    fleet.server.kill()
    fleet.server.serve()
    fleet.server.completed(name)
    with fleet.server.admin() as admin:
        admin.call(admin_pb2.ExtendRunRequest(run_id=name, rounds=2), admin_pb2.ExtendRunResponse)
    digests = fleet.server.digests(name)
    longer: dict[str, Any] = {"stop": {"rounds": 6}, "planned_rounds": 4}
    assert digests == simulated_digests(name, algorithm=algorithm, **longer)
    plain = simulated(name, algorithm={**algorithm, "schedules": {}}, **longer)
    assert [digests[t] == plain[t][0] for t in (0, 5)] == [True, False]
    result = replay(fleet.server, name)
    assert result.exit_code == 0, result.output
    shown = fleet.server.run(name).spec
    assert shown.algorithm.schedules["beta"].end == METHODS[method]["schedules"]["beta"]["end"]
    assert (shown.planned_rounds, shown.stop.rounds) == (4, 6)
