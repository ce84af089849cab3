"""A disk that is full or read-only during a round: the old state stays valid, and the run continues afterwards."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
from contextlib import closing

import pytest

from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace, eventually

LEDGER = 1 << 20
"""Largest file that may be written, in bytes: enough for the ledger, too little for a checkpoint with the table."""
BOUND_BY_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Prefix that runs a command without root's rights, because root can write into a read-only folder."""
NOTHING = 48 << 10
"""Too little for the ledger; enough for the small file of an update and for the log."""


@pytest.fixture
def server(workspace: Workspace) -> Coordinator:
    """A coordinator and a client of a model with a table that only checkpoints contain."""
    return with_a_client(workspace, Coordinator(workspace))


@pytest.fixture
def bound_server(workspace: Workspace) -> Coordinator:
    """The same with a coordinator without root's rights."""
    server = Coordinator(workspace)
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root writes into read-only folders, and there is no setpriv to hinder it")
        server.under = BOUND_BY_RIGHTS
    return with_a_client(workspace, server)


def with_a_client(workspace: Workspace, server: Coordinator) -> Coordinator:
    """Start the coordinator and its client."""
    server.serve()
    daemon = Daemon(workspace, server, "edge-1", options={"model": "frozen"}).start()
    server.until_present("edge-1")
    daemon.hold.touch()
    return server


def assigned(workspace: Workspace, server: Coordinator) -> str:
    """Create a run, wait until its client trains and all rows are written; returns its id."""
    one = {"clients_per_round": 1, "min_clients": 1}
    run = server.create("full", task={"options": {"model": "frozen"}}, round=one, stop={"rounds": 2})
    workspace.processes[1].logged("assignment", run=run)
    ledger = f"file:{workspace.folder}/server-state/ledger.sqlite?mode=ro"
    with closing(sqlite3.connect(ledger, uri=True)) as reader:
        state = "select state from runs where run_id = ?"
        eventually(
            lambda: reader.execute(state, (run,)).fetchone() == ("running",), "the run is written down as running"
        )
    return run


def fill_up(workspace: Workspace, server: Coordinator, limit: int) -> str:
    """Create a run that can write no file above this size after its first update is trained; returns its id."""
    run = assigned(workspace, server)
    limit_files(server.pid, limit)
    (workspace.folder / "edge-1.hold").unlink()
    return run


def trained(workspace: Workspace, run: str) -> list[int]:
    """Number of trainings of the client for each of the two rounds."""
    return [len(workspace.processes[1].events("trained", run=run, round=round_)) for round_ in (0, 1)]


def limit_files(pid: int, size: int) -> None:
    """Limit the size of all files of the process from now on."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def test_a_commit_waits_for_disk_space_and_the_run_continues(workspace: Workspace, server: Coordinator) -> None:
    """The run's reason names the file. With free space the round is committed, and nothing is trained twice."""
    run = fill_up(workspace, server, LEDGER)
    waiting = server.until(
        run, lambda status: "the coordinator cannot write: could not" in status.reason, "its reason has the error"
    )
    assert "make room or give the right to write, what was stored stays valid" in waiting.reason
    assert waiting.rounds_done == 0
    limit_files(server.pid, resource.RLIM_INFINITY)
    server.completed(run)
    assert trained(workspace, run) == [1, 1]


def test_an_update_that_cannot_be_written_is_not_acknowledged(workspace: Workspace, server: Coordinator) -> None:
    """The client has to retry, keeps its update, and delivers it once there is space."""
    run = fill_up(workspace, server, NOTHING)
    refused = server.logged("rpc_refused", rpc="SubmitUpdate", code="UNAVAILABLE")
    assert "the coordinator cannot write: could not record the update of 'edge-1' in run 'full'" in refused["error"]
    assert server.run(run).admitted == 0
    limit_files(server.pid, resource.RLIM_INFINITY)
    server.completed(run)
    assert trained(workspace, run) == [1, 1]


@pytest.mark.slow  # lives of depth 2 have kills on full disks
def test_a_coordinator_killed_on_a_full_disk_starts_from_the_old_state(
    workspace: Workspace, server: Coordinator
) -> None:
    """After SIGKILL during the wait for space it restarts with the last valid state and the update, and continues."""
    run = fill_up(workspace, server, LEDGER)
    server.logged("no_room", run=run)
    server.kill()
    server.serve()
    server.completed(run)
    assert trained(workspace, run) == [1, 1]


@pytest.mark.slow
def test_a_read_only_spool_accepts_updates_once_it_is_writable(workspace: Workspace, bound_server: Coordinator) -> None:
    """The client gets the reason and a retry time. Until then nothing is acknowledged, and nothing is trained twice."""
    run, spool = assigned(workspace, bound_server), workspace.folder / "server-state" / "spool"
    spool.chmod(0o555)
    (workspace.folder / "edge-1.hold").unlink()
    refused = bound_server.logged("rpc_refused", rpc="SubmitUpdate", code="UNAVAILABLE")
    assert "Permission denied" in refused["error"]
    assert "make room or give the right to write, what was stored stays valid" in refused["error"]
    assert bound_server.run(run).admitted == 0
    spool.chmod(0o755)
    bound_server.completed(run)
    assert trained(workspace, run) == [1, 1]


@pytest.mark.slow
def test_a_round_is_committed_once_its_folder_is_writable(workspace: Workspace, bound_server: Coordinator) -> None:
    """The run's reason names the folder. The run continues by itself, and log and history have both events."""
    run = assigned(workspace, bound_server)
    folder = workspace.folder / "server-state" / "checkpoints" / f"run-{run}"
    folder.chmod(0o555)
    (workspace.folder / "edge-1.hold").unlink()
    waiting = bound_server.until(
        run, lambda status: "the coordinator cannot write" in status.reason, "its reason has the error"
    )
    assert "could not save the checkpoint of run 'full' round 0" in waiting.reason
    folder.chmod(0o755)
    bound_server.completed(run)
    assert (trained(workspace, run), bound_server.history(run).count("run_goes_on")) == ([1, 1], 1)
    assert bound_server.logged("room_again", run=run)["round"] == 0
