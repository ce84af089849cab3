"""A disk that is full while a round is committed: the old state stays valid, and the run goes on when there is room."""

from __future__ import annotations

import resource

import pytest

from tests.integration.harness import PRESENT, Coordinator, Daemon
from tests.integration.processes import eventually

LEDGER = 1 << 20
"""Largest file that may be written, in bytes: the ledger has room, a checkpoint with the frozen table has not."""
NOTHING = 48 << 10
"""The ledger has no room either; only the small file of an update has, and the log."""


@pytest.fixture
def server(place):
    """A coordinator and a client of a model with a table that only checkpoints contain."""
    server = Coordinator(place).serve()
    daemon = Daemon(place, server, "edge-1", options={"model": "frozen"}).start()
    eventually(lambda: server.client("edge-1").state == PRESENT, "edge-1 attends")
    daemon.hold.touch()
    return server


def fill_up(place, server, room):
    """A run that finds no room for anything larger once its first update is trained; returns its id."""
    one = {"clients_per_round": 1, "min_clients": 1}
    run = server.create("full", task={"options": {"model": "frozen"}}, round=one, stop={"rounds": 2})
    place.processes[1].logged("assignment", run=run)
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
