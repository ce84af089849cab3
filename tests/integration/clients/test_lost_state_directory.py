"""The state directory of a real daemon is deleted during a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace, eventually, run_fl

ONE = {"clients_per_round": 1, "min_clients": 1}


@pytest.mark.slow
def test_a_device_without_its_state_directory_steps_back_and_returns(workspace: Workspace) -> None:
    """A file is in its place: the operator reads why the device may not train, and the run waits.

    Without the file the daemon makes its directory again, with its identity and shard, and the run completes.
    """
    server = Coordinator(workspace).serve()
    daemon = Daemon(workspace, server, "edge-1", gates={"check_s": 0.05}, metrics_listen="").start()
    server.until_present("edge-1")
    folder = Path(daemon.settings["state_dir"])
    kept = {name: (folder / name).read_bytes() for name in ("identity.json", "shard.json")}
    server.completed(server.create("before", round=ONE))
    shutil.rmtree(folder)
    folder.touch()
    eventually(lambda: not server.client("edge-1").availability.may_train, "the coordinator knows")
    run = server.create("after", round=ONE)
    shown = run_fl(
        "clients", "show", "edge-1", "--insecure", "--server", server.settings["admin_listen"], folder=workspace.folder
    )
    assert "state_dir: " in shown.stdout
    assert "takes no work until then" in daemon.logged("state_dir_unusable")["todo"]
    folder.unlink()
    server.completed(run)
    daemon.logged("state_dir_made_again")
    assert {name: (folder / name).read_bytes() for name in kept} == kept
    assert daemon.terminate() == 0
