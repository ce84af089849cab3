"""Trainers of Hugging Face and Lightning in real processes: a networked run is the simulated one, after SIGKILL too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.federation import Daemon, Fleet
from tests.processes.process import HERE, Workspace
from tests.processes.simulated import check_replay, simulated_digests

TASKS = ["hugging_face_script:Federated", "lightning_script:Federated"]


class ScriptFleet(Fleet):
    """Daemons with a training script as their task."""

    script = ""

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon without starting it."""
        shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
        daemon = Daemon(self.workspace, self.server, f"edge-{index}", shard=shard)
        daemon.configure(task={"name": self.script, "options": {}})
        return daemon


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning:lightning")
@pytest.mark.parametrize("task", TASKS)
def test_killed_processes_change_no_bit(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    """Coordinator and one daemon are killed in mid-run. The models are those of the simulation and of the replay."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setattr(ScriptFleet, "script", task)
    fleet = ScriptFleet(workspace, 3, tasks=[task])
    sections: dict[str, Any] = {
        "task": {"name": task},
        "algorithm": {"name": "fedavgm"},
        "local": {"epochs": 2, "learning_rate": 0.01, "batch_size": 4},
        "round": {"clients_per_round": 3, "quorum": 3},
        "stop": {"rounds": 4},
    }
    with fleet.lent():
        fleet.server.create("script", **sections)
        fleet.server.until("script", lambda run: run.rounds_done, "a round is done")
        fleet["edge-0"].kill()
        fleet.server.kill()
        fleet.server.serve()
        fleet["edge-0"].start()
        fleet.server.completed("script")
        digests = fleet.server.digests("script")
        assert digests == simulated_digests("script", **sections)
        check_replay(fleet.server, "script", task={"name": task})
