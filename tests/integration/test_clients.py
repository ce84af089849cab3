"""What an operator can do with a client, and what the client says about it."""

from __future__ import annotations

import pytest

from fl_ops.errors import NotFound
from protos.fl.v1 import admin_pb2
from tests.integration.harness import PRESENT, Daemon
from tests.integration.processes import eventually


def test_a_banned_daemon_says_so_and_stays_out(fleet):
    """Banned in mid-training: the round closes without it, and its log has the reason; a restart lifts no ban."""
    server = fleet.server
    _, slow = fleet.half_delivered("banned", round={"quorum": 1}, stop={"rounds": 1})
    with server.admin() as admin:
        admin.ban_client(slow.client_id, "it sends noise")
    server.completed("banned")
    assert server.rounds("banned")[0].accepted == 1
    assert "needed: to be unbanned (banned: it sends noise)" in slow.logged("refused")["reason"]
    server.kill()
    server.serve()
    assert server.client(slow.client_id).banned
    slow.kill()
    slow.start()
    slow.logged("refused", count=2)
    assert server.history(slow.client_id)[-1] == "client_banned"


def test_an_unbanned_client_takes_part_again(fleet):
    """After unban the daemon registers and is drawn; both steps stand in its history, with who and why."""
    server, daemon = fleet.server, fleet["edge-1"]
    with server.admin() as admin:
        admin.ban_client("edge-1", "a mistake")
        admin.unban_client("edge-1")
        daemon.kill()
        daemon.start()
        fleet.attend()
        lines = [(line.actor, line.event, line.detail) for line in admin.list_history("edge-1", 0)]
    assert [("admin", "client_banned", "a mistake"), ("admin", "client_unbanned", "")] == lines[-2:]
    server.completed(server.create("unbanned", round={"clients_per_round": 3}))


def test_a_client_can_be_banned_before_it_comes(fleet):
    """A ban by name alone: the daemon that comes later is refused in words."""
    with fleet.server.admin() as admin:
        assert admin.ban_client("edge-stolen", "stolen").banned
    stolen = Daemon(fleet.place, fleet.server, "edge-stolen").start()
    assert "banned: stolen" in stolen.logged("refused")["reason"]
    assert stolen.terminate() == 0


def test_a_drained_client_finishes_and_gets_nothing_new(fleet):
    """Its update counts, then others are drawn, also after a restart, until the drain is undone."""
    server = fleet.server
    _, slow = fleet.half_delivered("drain", round={"min_clients": 2})
    with server.admin() as admin:
        admin.drain_client(slow.client_id, "maintenance", undo=False)
    slow.hold.unlink()
    server.completed("drain")
    assert len(slow.events("submitted", run="drain")) == 1
    server.kill()
    server.serve()
    assert server.client(slow.client_id).draining
    with server.admin() as admin:
        admin.drain_client(slow.client_id, "", undo=True)
    server.completed(server.create("undrained", round={"clients_per_round": 3}))
    assert server.history(slow.client_id)[-2:] == ["client_drained", "client_undrained"]


def test_a_forgotten_client_is_off_the_list_and_may_register_anew(fleet):
    """Forgotten, it is unknown; a daemon of that name that starts later is a new client."""
    server, daemon = fleet.server, fleet["edge-2"]
    daemon.terminate()
    with server.admin() as admin:
        admin.forget_client("edge-2")
        assert "edge-2" not in {client.client_id for client in admin.list_clients()}
        with pytest.raises(NotFound, match="no client 'edge-2' has registered; `fl clients list`"):
            admin.forget_client("edge-2")
    daemon.start()
    eventually(lambda: server.client("edge-2").state == PRESENT, "it is there again")
    assert server.history("edge-2")[-2:] == ["client_forgotten", "client_registered"]


def test_clients_that_are_away_are_listed_as_lost(fleet):
    """A daemon that is gone when the coordinator starts anew is listed, as suspect or lost, with what it registered."""
    server, daemon = fleet.server, fleet["edge-0"]
    daemon.terminate()
    server.kill()
    server.serve()
    away = server.client("edge-0")
    assert away.state in {admin_pb2.CLIENT_STATE_SUSPECT, admin_pb2.CLIENT_STATE_LOST}
    assert [offer.train_examples for offer in away.tasks] == [64]


def test_what_counted_is_counted(fleet):
    """Each client's counter of counted updates grows by its part of a run's rounds."""
    before = {name: fleet.server.client(name).updates_counted for name in fleet.daemons}
    fleet.server.completed(fleet.server.create("counted", round={"clients_per_round": 3}))
    after = {name: fleet.server.client(name).updates_counted for name in fleet.daemons}
    assert after == {name: count + 4 for name, count in before.items()}


def test_two_daemons_with_one_identity_do_not_fight(fleet):
    """The newer one stays; the older one ends with exit code 3 and says which identity is used twice."""
    twin = Daemon(fleet.place, fleet.server, "edge-1", process="twin").start()
    twin.logged("registered")
    assert fleet["edge-1"].wait() == 3
    assert "another daemon uses the identity edge-1: end one of them" in fleet["edge-1"].errors()
    fleet.server.logged("client_fenced", client="edge-1")
    assert fleet.server.history("edge-1")[-1] == "client_fenced"
    assert twin.terminate() == 0


def test_a_state_directory_is_one_daemons(fleet):
    """A second daemon on the same state directory is refused with exit code 2 and told which process holds it."""
    holder = fleet["edge-2"]
    second = Daemon(fleet.place, fleet.server, "edge-2", process="second", state_dir=holder.settings["state_dir"])
    assert second.start().wait() == 2
    assert f"is held by another daemon, process {holder.pid}: end that one" in second.errors()
