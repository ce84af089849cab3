"""A disk that is full or read-only in mid-round: the old state stays valid, and the run goes on when it can."""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
from contextlib import closing

import pytest

from tests.integration.harness import PRESENT, Coordinator, Daemon
from tests.integration.processes import eventually

LEDGER = 1 << 20
"""Largest file that may be written, in bytes: the ledger has room, a checkpoint with the frozen table has not."""
BOUND_BY_RIGHTS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
"""Runs a command of an administrator, whom a read-only folder does not hinder, like one of anybody's."""
NOTHING = 48 << 10
"""The ledger has no room either; only the small file of an update has, and the log."""


@pytest.fixture
def server(place):
    """A coordinator and a client of a model with a table that only checkpoints contain."""
    return with_a_client(place, Coordinator(place))


@pytest.fixture
def bound_server(place):
    """The same, and the coordinator has no more rights than its files give it."""
    server = Coordinator(place)
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root writes into read-only folders, and there is no setpriv to hinder it")
        server.under = BOUND_BY_RIGHTS
    return with_a_client(place, server)


def with_a_client(place, server):
    """The coordinator serves, and its client is there."""
    server.serve()
    daemon = Daemon(place, server, "edge-1", options={"model": "frozen"}).start()
    eventually(lambda: server.client("edge-1").state == PRESENT, "edge-1 attends")
    daemon.hold.touch()
    return server


def assigned(place, server):
    """A run whose client is in mid-training, and the ledger has all that there is to write; returns its id."""
    one = {"clients_per_round": 1, "min_clients": 1}
    run = server.create("full", task={"options": {"model": "frozen"}}, round=one, stop={"rounds": 2})
    place.processes[1].logged("assignment", run=run)
    ledger = f"file:{place.folder}/server-state/ledger.sqlite?mode=ro"
    with closing(sqlite3.connect(ledger, uri=True)) as reader:
        state = "select state from runs where run_id = ?"
        eventually(
            lambda: reader.execute(state, (run,)).fetchone() == ("running",), "the run is written down as running"
        )
    return run


def fill_up(place, server, room):
    """A run that finds no room for anything larger once its first update is trained; returns its id."""
    run = assigned(place, server)
    limit_files(server.pid, room)
    (place.folder / "edge-1.hold").unlink()
    return run


def trained(place, run):
    """How often the client trained for each of the two rounds."""
    return [len(place.processes[1].events("trained", run=run, round=round_)) for round_ in (0, 1)]


def limit_files(pid, size):
    """No file of the process may grow beyond this from now on."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def test_a_commit_waits_for_room_and_the_run_goes_on(place, server):
    """It says in words what it cannot write; with room again the round is committed, with nothing trained twice."""
    run = fill_up(place, server, LEDGER)
    waiting = server.until(run, lambda status: "the coordinator cannot write: could not" in status.reason, "it says so")
    assert "make room or give the right to write, what was stored stays valid" in waiting.reason
    assert waiting.rounds_done == 0
    limit_files(server.pid, resource.RLIM_INFINITY)
    server.completed(run)
    assert trained(place, run) == [1, 1]


def test_an_update_that_cannot_be_written_down_is_not_acknowledged(place, server):
    """The client is told to come again, keeps its update meanwhile, and delivers it when there is room."""
    run = fill_up(place, server, NOTHING)
    refused = server.logged("rpc_refused", rpc="SubmitUpdate", code="UNAVAILABLE")
    assert "the coordinator cannot write: could not record the update of 'edge-1' in run 'full'" in refused["error"]
    assert server.run(run).admitted == 0
    limit_files(server.pid, resource.RLIM_INFINITY)
    server.completed(run)
    assert trained(place, run) == [1, 1]


def test_a_coordinator_killed_on_a_full_disk_starts_from_the_old_state(place, server):
    """SIGKILL while it waits for room: the restarted one has the last valid state and the update, and goes on."""
    run = fill_up(place, server, LEDGER)
    server.logged("no_room", run=run)
    server.kill()
    server.serve()
    server.completed(run)
    assert trained(place, run) == [1, 1]


def test_a_spool_that_is_read_only_takes_updates_when_it_is_not(place, bound_server):
    """The client is told why and to come again; nothing is acknowledged meanwhile, and nothing trained twice."""
    run, spool = assigned(place, bound_server), place.folder / "server-state" / "spool"
    spool.chmod(0o555)
    (place.folder / "edge-1.hold").unlink()
    refused = bound_server.logged("rpc_refused", rpc="SubmitUpdate", code="UNAVAILABLE")
    assert "Permission denied" in refused["error"]
    assert "make room or give the right to write, what was stored stays valid" in refused["error"]
    assert bound_server.run(run).admitted == 0
    spool.chmod(0o755)
    bound_server.completed(run)
    assert trained(place, run) == [1, 1]


def test_a_round_is_committed_when_its_folder_is_not_read_only_any_more(place, bound_server):
    """The run says what it cannot write, goes on by itself, and both stand in its log and history."""
    run = assigned(place, bound_server)
    folder = place.folder / "server-state" / "checkpoints" / f"run-{run}"
    folder.chmod(0o555)
    (place.folder / "edge-1.hold").unlink()
    waiting = bound_server.until(run, lambda status: "the coordinator cannot write" in status.reason, "it says so")
    assert "could not save the checkpoint of run 'full' round 0" in waiting.reason
    folder.chmod(0o755)
    bound_server.completed(run)
    assert (trained(place, run), bound_server.history(run).count("run_goes_on")) == ([1, 1], 1)
    assert bound_server.logged("room_again", run=run)["round"] == 0
