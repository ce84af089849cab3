"""A restarted coordinator that serves while it loads a run: daemons keep that run's work, and deliver it once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes import workers
from tests.processes.federation import Fleet
from tests.processes.process import HERE, Workspace, eventually
from tests.processes.simulated import simulated_digests

SIZE = 2
LATE: dict[str, Any] = {
    "round": {"clients_per_round": SIZE, "min_clients": SIZE},
    "evaluation": {"clients_every": 1},
    "stop": {"rounds": 2},
}


def asked_again(process: Any, rpc: str) -> bool:
    """Whether a process has told a caller of a method to come again."""
    wanted = f'rpc="{rpc}"', 'code="UNAVAILABLE"', "fl_rpc_seconds_count{"
    return any(all(part in line for part in wanted) for line in process.metrics().decode().splitlines())


@pytest.mark.parametrize("with_worker", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["alone", "worker"])
def test_work_for_a_run_that_is_still_loading_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_worker: bool
) -> None:
    """Killed while one daemon trains and one has delivered; the update comes while the run's task makes its model.

    It is sent again until the run is loaded. Nobody trains a round twice, and the models are the simulated ones.
    """
    monkeypatch.syspath_prepend(HERE)
    with Workspace(tmp_path) as workspace:
        settings: dict[str, Any] = {"workers": workers.section()} if with_worker else {}
        fleet = Fleet(workspace, SIZE, limits={"reattach_grace_s": 60.0, "restore_wait_s": 0.0}, **settings)
        receiver = workers.Worker(workspace, fleet.server, "worker").serve() if with_worker else fleet.server
        server, slow_load = fleet.server, workspace.folder / "slow-load"
        task = {"options": {"hold_model": str(slow_load)}}
        _, slow = fleet.half_delivered("late", task=task, **LATE)
        server.kill()
        slow_load.touch()
        server.serve()
        fleet.until_all_present()
        assert server.logged("runs_still_loading")["runs"] == ["late"]
        slow.hold.unlink()
        rpc = "ReceiveUpdate" if with_worker else "SubmitUpdate"
        eventually(lambda: asked_again(server, rpc), f"a call of {rpc} is to come again")
        if with_worker:
            assert receiver.exit_code is None
        slow_load.unlink()
        assert server.digests("late") == simulated_digests("late", clients=SIZE, **LATE)
        for daemon in fleet.daemons.values():
            assert [line["round"] for line in daemon.events("trained", run="late")] == [0, 1]
            assert daemon.events("update_refused") == daemon.events("work_failed") == []
