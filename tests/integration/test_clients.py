"""What an operator can do with a client, and what the client says about it."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack

import grpc
import pytest

from fl_ops.errors import NotFound
from fl_server.sampling import Draw, draw_fixed
from protos.fl.v1 import admin_pb2, coordinator_pb2, coordinator_pb2_grpc
from tests.integration.harness import PRESENT, TASK, Coordinator, Daemon
from tests.integration.processes import PATIENCE_S, Place, eventually
from tests.integration.raw_client import RawClient, messages

SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
"""Of a connection on which little is under way that was not asked for yet."""


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


def test_a_ban_ends_an_open_upload(fleet):
    """The call ends with the reason, what came is off the disk, nothing counts, and another client has the place."""
    server = fleet.server
    seed = next(
        seed for seed in itertools.count() if "raw-1" in draw_fixed(["raw-1", *fleet.daemons], 2, Draw(seed, 0, 0))
    )
    with RawClient(server.address) as client, server.admin() as admin:
        client.register()
        events = client.attend()
        fleet.hold()
        server.create("cut", round={"min_clients": 4, "quorum": 2}, stop={"rounds": 1}, seed=seed)
        update = client.update(next(event for event in events if event.HasField("assignment")).assignment)
        silent = threading.Event()
        call = client.stub.SubmitUpdate.future(unfinished(update, silent), timeout=PATIENCE_S)
        parts = server.folder / "server-state" / "spool"
        eventually(lambda: list(parts.rglob("raw-1.part")), "a part of it is there")
        admin.ban_client("raw-1", "it sends noise")
        refused = call.exception(timeout=PATIENCE_S)
        silent.set()
        assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "to be unbanned (banned: it sends noise)" in refused.details()
        assert not list(parts.rglob("raw-1*"))
    fleet.release()
    server.completed("cut")
    (summary,) = server.rounds("cut")
    assert (summary.attempts, summary.accepted, summary.dropped) == (2, 2, 1)
    assert server.client("raw-1").updates_counted == 0


def unfinished(update, silent):
    """Header and one chunk of an update, then nothing until `silent` is set."""
    yield from messages(update, 64)[:2]
    silent.wait(PATIENCE_S)


def test_a_ban_ends_an_open_download(tmp_path):
    """The client has read a message or two of a large model: the call ends with the reason, short of the whole."""
    with Place(tmp_path) as place:
        server = Coordinator(place, settings={"limits": {"chunk_bytes": 1 << 16}}).serve()
        with RawClient(server.address) as client, server.admin() as admin, ExitStack() as stack:
            client.register()
            events = client.attend()
            one = {"clients_per_round": 1, "min_clients": 1}
            server.create("large", round=one, task={"name": TASK, "options": {"model": "frozen"}})
            resources = next(event for event in events if event.HasField("assignment")).assignment.resources
            largest = max(resources, key=lambda resource: resource.size_bytes)
            request = coordinator_pb2.FetchModelRequest(session_id=client.session_id, digest=largest.digest)
            channel = stack.enter_context(grpc.insecure_channel(server.address, SMALL_WINDOW))
            reading = coordinator_pb2_grpc.CoordinatorStub(channel).FetchModel(request, timeout=PATIENCE_S)
            next(reading)
            admin.ban_client("raw-1", "it fetches too much")
            more = []
            with pytest.raises(grpc.RpcError, match="banned: it fetches too much") as ended:
                more.extend(reading)
            assert ended.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert sum(len(message.chunk.data) for message in more) < largest.size_bytes


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
    said = [line for line in lines if line[0] == "admin"]
    assert [("admin", "client_banned", "a mistake"), ("admin", "client_unbanned", "")] == said[-2:]
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
    """Of two that have done no work the newer one is served; the older one waits, and says what to do about it."""
    first = Daemon(fleet.place, fleet.server, "double", process="first").start()
    first.logged("registered")
    eventually(lambda: fleet.server.client("double").state == PRESENT, "it attends")
    twin = Daemon(fleet.place, fleet.server, "double", process="twin").start()
    twin.logged("registered")
    assert first.logged("fenced")["todo"].startswith("two daemons use one identity: end one of them")
    fenced = fleet.server.logged("client_fenced", client="double")
    assert fenced["older_address"].startswith("127.0.0.1:")
    assert fenced["newer_address"].startswith("127.0.0.1:")
    assert fleet.server.history("double")[-1] == "client_fenced"
    assert (twin.terminate(), first.terminate()) == (0, 0)


def test_a_state_directory_is_one_daemons(fleet):
    """A second daemon on the same state directory is refused with exit code 2 and told which process holds it."""
    holder = fleet["edge-2"]
    second = Daemon(fleet.place, fleet.server, "edge-2", process="second", state_dir=holder.settings["state_dir"])
    assert second.start().wait() == 2
    assert f"is held by another daemon, process {holder.pid}: end that one" in second.errors()
