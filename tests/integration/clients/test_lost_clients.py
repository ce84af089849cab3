"""Daemons that are killed, stopped, or started before their coordinator."""

from __future__ import annotations

import signal

import pytest

from protos.fl.v1 import admin_pb2
from tests.processes.federation import Coordinator, Daemon, Fleet
from tests.processes.process import Workspace


def test_a_round_closes_when_a_killed_daemon_is_known_to_be_lost(workspace: Workspace) -> None:
    """SIGKILL in mid-round: the round is committed with the other daemon's update, ten minutes before its deadline."""
    fleet = Fleet(workspace, 2, limits={"reattach_grace_s": 2.0})
    quick, slow = fleet.half_delivered("lost", round={"min_clients": 2, "quorum": 1}, stop={"rounds": 1})
    slow.kill()
    fleet.server.completed("lost")
    committed = fleet.server.rounds("lost")[0]
    assert (committed.accepted, committed.dropped, committed.attempts) == (1, 1, 1)
    assert fleet.server.events("client_lost", client=slow.client_id)
    assert quick.logged("outcome", run="lost", round=0)["counted"]


@pytest.mark.slow
def test_a_daemon_that_ends_in_each_training_holds_no_round_up(workspace: Workspace) -> None:
    """Started again each time, as by a service: after two processes the round is committed, before its deadline."""
    server = Coordinator(workspace, settings={"quarantine": {"restarts": 2}}).serve()
    crashing = Daemon(workspace, server, "edge-crash", options={"fails": "crash"}).start()
    Daemon(workspace, server, "edge-well").start()
    for name in ("edge-crash", "edge-well"):
        server.until_present(name)
    round_ = {"clients_per_round": 2, "min_clients": 2, "quorum": 1}
    run = server.create("crash", round=round_, stop={"rounds": 1})
    for _ in range(2):
        assert crashing.wait() == -signal.SIGKILL
        crashing.start()
    server.completed(run)
    why = "the daemon restarted while it worked: 2 processes of it had the assignment, and none answered"
    assert server.client("edge-crash").note == why
    assert server.run(run).latest_failure.message == why
    assert server.rounds(run)[0].accepted == 1


def test_a_daemon_stopped_in_training_exits_with_0(fleet: Fleet) -> None:
    """SIGTERM during a training of ten million steps: exit code 0, and the coordinator knows why it left."""
    fleet.server.create("endless", local={"epochs": None, "steps": 10_000_000}, stop={"rounds": 1})
    cohort = fleet.server.until("endless", lambda run: run.cohort, "it draws").cohort
    daemon = fleet[cohort[0]]
    daemon.logged("assignment", run="endless")
    assert daemon.terminate() == 0
    assert daemon.events("stopped")
    assert not daemon.events("trained", run="endless")
    assert fleet.server.client(daemon.client_id).availability.detail == "the daemon is stopping"


def test_a_daemon_stops_although_a_training_step_hangs(fleet: Fleet) -> None:
    """SIGTERM while the task's own code does not return: exit code 0 all the same."""
    _, slow = fleet.half_delivered("hanging")
    assert slow.terminate() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_daemon_stops_on_a_signal(fleet: Fleet, number: signal.Signals) -> None:
    """Both signals end a daemon that waits for work, with exit code 0."""
    fleet["edge-0"].signal(number)
    assert fleet["edge-0"].wait() == 0


def test_a_daemon_waits_for_a_coordinator_that_comes_later(workspace: Workspace) -> None:
    """Without a coordinator it logs that and retries; it joins once there is one."""
    server = Coordinator(workspace).serve()
    server.terminate()
    daemon = Daemon(workspace, server, "edge-early").start()
    assert "the port is closed; is the coordinator running?" in daemon.logged("disconnected")["reason"]
    server.serve()
    daemon.logged("registered")
    server.until_present("edge-early")


def test_a_run_waits_for_enough_clients(workspace: Workspace) -> None:
    """A run created before its clients waits, and starts by itself when they come."""
    server = Coordinator(workspace).serve()
    run = server.create("patient", round={"clients_per_round": 1, "min_clients": 1}, stop={"rounds": 1})
    waiting = server.until(run, lambda status: status.state == admin_pb2.RUN_STATE_WAITING, "it waits")
    assert waiting.reason == "clients that could be drawn: 0 of 1 here; it lacks clients: none is here"
    Daemon(workspace, server, "edge-late").start()
    server.completed(run)
