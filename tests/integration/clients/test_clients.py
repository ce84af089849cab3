"""Operations on a client, and the client's messages about them."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from fl_ops.errors import NotFound
from fl_server.rounds.sampling import Draw, draw_fixed
from protos.fl.v1 import admin_pb2, coordinator_pb2, coordinator_pb2_grpc
from protos.fl.v1 import coordinator_pb2 as pb
from tests.processes.federation import TASK, Coordinator, Daemon, Fleet
from tests.processes.process import TIMEOUT_S, Workspace, eventually, run_program
from tests.processes.raw_client import RawClient, Update, messages

SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16))
"""Options of a connection with a small window for unread data."""


def test_a_banned_daemon_logs_the_ban_and_stays_out(fleet: Fleet) -> None:
    """A ban during training: the round closes without the daemon, its log has the reason. A restart keeps the ban."""
    server = fleet.server
    _, slow = fleet.half_delivered("banned", round={"quorum": 1}, stop={"rounds": 1})
    with server.admin() as admin:
        admin.clients.ban_client(slow.client_id, "it sends noise")
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


def test_a_ban_ends_an_open_upload(fleet: Fleet) -> None:
    """The call ends with the reason, the received bytes are deleted, nothing counts, and another client replaces it."""
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
        call = client.stub.SubmitUpdate.future(unfinished(update, silent), timeout=TIMEOUT_S)
        parts = server.folder / "server-state" / "spool"
        eventually(lambda: list(parts.rglob("raw-1.part")), "a part of it is there")
        admin.clients.ban_client("raw-1", "it sends noise")
        refused = call.exception(timeout=TIMEOUT_S)
        silent.set()
        assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "to be unbanned (banned: it sends noise)" in refused.details()
        assert not list(parts.rglob("raw-1*"))
    fleet.release()
    server.completed("cut")
    (summary,) = server.rounds("cut")
    assert (summary.attempts, summary.accepted, summary.dropped) == (2, 2, 1)
    assert server.client("raw-1").updates_counted == 0


def unfinished(update: Update, silent: threading.Event) -> Iterator[pb.SubmitUpdateRequest]:
    """Header and one chunk of an update, then nothing until `silent` is set."""
    yield from messages(update, 64)[:2]
    silent.wait(TIMEOUT_S)


def test_a_ban_ends_an_open_download(tmp_path: Path) -> None:
    """The client has read one or two messages of a large model. The call ends with the reason before the end."""
    with Workspace(tmp_path) as workspace:
        server = Coordinator(workspace, settings={"limits": {"chunk_bytes": 1 << 16}}).serve()
        with RawClient(server.address) as client, server.admin() as admin, ExitStack() as stack:
            client.register()
            events = client.attend()
            one = {"clients_per_round": 1, "min_clients": 1}
            server.create("large", round=one, task={"name": TASK, "options": {"model": "frozen"}})
            resources = next(event for event in events if event.HasField("assignment")).assignment.resources
            largest = max(resources, key=lambda resource: resource.size_bytes)
            request = coordinator_pb2.FetchModelRequest(session_id=client.session_id, digest=largest.digest)
            channel = stack.enter_context(grpc.insecure_channel(server.address, SMALL_WINDOW))
            reading = coordinator_pb2_grpc.CoordinatorStub(channel).FetchModel(request, timeout=TIMEOUT_S)
            next(reading)
            admin.clients.ban_client("raw-1", "it fetches too much")
            more = []
            with pytest.raises(grpc.RpcError, match="banned: it fetches too much") as ended:
                more.extend(reading)
            assert ended.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert sum(len(message.chunk.data) for message in more) < largest.size_bytes


def test_an_unbanned_client_takes_part_again(fleet: Fleet) -> None:
    """After the unban the daemon registers and is drawn. Its history has both steps with actor and reason."""
    server, daemon = fleet.server, fleet["edge-1"]
    with server.admin() as admin:
        admin.clients.ban_client("edge-1", "a mistake")
        admin.call(admin_pb2.UnbanClientRequest(client_id="edge-1"), admin_pb2.UnbanClientResponse)
        daemon.kill()
        daemon.start()
        fleet.until_all_present()
        lines = [(line.actor, line.event, line.detail) for line in admin.history.list_history("edge-1", 0)]
    admin_lines = [line for line in lines if line[0] == "admin"]
    assert [("admin", "client_banned", "a mistake"), ("admin", "client_unbanned", "")] == admin_lines[-2:]
    server.completed(server.create("unbanned", round={"clients_per_round": 3}))


def test_a_client_can_be_banned_before_it_registers(fleet: Fleet) -> None:
    """A daemon that registers after a ban of its name is refused with a message."""
    with fleet.server.admin() as admin:
        assert admin.clients.ban_client("edge-stolen", "stolen").banned
    stolen = Daemon(fleet.workspace, fleet.server, "edge-stolen").start()
    assert "banned: stolen" in stolen.logged("refused")["reason"]
    assert stolen.terminate() == 0


@pytest.mark.slow
def test_a_drained_client_finishes_and_gets_nothing_new(fleet: Fleet) -> None:
    """Its update counts, then others are drawn, also after a restart, until the drain is undone."""
    server = fleet.server
    _, slow = fleet.half_delivered("drain", round={"min_clients": 2})
    with server.admin() as admin:
        admin.call(
            admin_pb2.DrainClientRequest(client_id=slow.client_id, reason="maintenance"), admin_pb2.DrainClientResponse
        )
    slow.hold.unlink()
    server.completed("drain")
    assert len(slow.events("submitted", run="drain")) == 1
    server.kill()
    server.serve()
    assert server.client(slow.client_id).draining
    with server.admin() as admin:
        admin.call(admin_pb2.DrainClientRequest(client_id=slow.client_id, undo=True), admin_pb2.DrainClientResponse)
    server.completed(server.create("undrained", round={"clients_per_round": 3}))
    assert server.history(slow.client_id)[-2:] == ["client_drained", "client_undrained"]


def test_a_forgotten_client_is_not_listed_and_may_register_again(fleet: Fleet) -> None:
    """A forgotten client is unknown. A later daemon of that name is a new client."""
    server, daemon = fleet.server, fleet["edge-2"]
    daemon.terminate()
    with server.admin() as admin:
        admin.clients.forget_client("edge-2")
        assert "edge-2" not in {client.client_id for client in admin.clients.list_clients()}
        with pytest.raises(NotFound, match="no client 'edge-2' has registered; `fl clients list`"):
            admin.clients.forget_client("edge-2")
    daemon.start()
    server.until_present("edge-2")
    assert server.history("edge-2")[-2:] == ["client_forgotten", "client_registered"]


def test_absent_clients_are_listed_as_lost(fleet: Fleet) -> None:
    """A daemon that is absent at a restart is listed as suspect or lost, with its registration."""
    server, daemon = fleet.server, fleet["edge-0"]
    daemon.terminate()
    server.kill()
    server.serve()
    away = server.client("edge-0")
    assert away.state in {admin_pb2.CLIENT_STATE_SUSPECT, admin_pb2.CLIENT_STATE_LOST}
    assert [offer.train_examples for offer in away.tasks] == [64]


@pytest.mark.slow  # fl_server/clients/test_counted_updates has this without processes
def test_metrics_count_the_ledgers_updates(fleet: Fleet) -> None:
    """Each client's counter of counted updates grows by its number of rounds."""
    before = {name: fleet.server.client(name).updates_counted for name in fleet.daemons}
    fleet.server.completed(fleet.server.create("counted", round={"clients_per_round": 3}))
    after = {name: fleet.server.client(name).updates_counted for name in fleet.daemons}
    assert after == {name: count + 3 for name, count in before.items()}


def test_two_daemons_with_one_identity_do_not_alternate(fleet: Fleet) -> None:
    """Of two idle daemons the newer one is served. The older one waits and logs the remedy."""
    first = Daemon(fleet.workspace, fleet.server, "double", process="first").start()
    first.logged("registered")
    fleet.server.until_present("double")
    twin = Daemon(fleet.workspace, fleet.server, "double", process="twin").start()
    twin.logged("registered")
    assert first.logged("fenced")["todo"].startswith("two daemons use one identity: end one of them")
    fenced = fleet.server.logged("client_fenced", client="double")
    assert fenced["older_address"].startswith("127.0.0.1:")
    assert fenced["newer_address"].startswith("127.0.0.1:")
    assert fleet.server.history("double")[-1] == "client_fenced"
    assert (twin.terminate(), first.terminate()) == (0, 0)


def test_a_state_directory_belongs_to_one_daemon(fleet: Fleet) -> None:
    """A second daemon on the same state directory exits with 2 and names the process that holds it."""
    holder = fleet["edge-2"]
    second = Daemon(fleet.workspace, fleet.server, "edge-2", process="second", state_dir=holder.settings["state_dir"])
    assert second.start().wait() == 2
    assert f"is held by another daemon, process {holder.pid}: end that one" in second.errors()


def test_a_run_draws_only_clients_of_its_version(fleet: Fleet) -> None:
    """Daemons are too old: the run says so, `fl-client doctor` has the remedy, a newer client is drawn.

    The list of clients has the versions, those that are too old, and the oldest first.
    """
    server = fleet.server
    with RawClient(server.address, "raw-new") as client, server.admin() as admin:
        client.register(software="impetus 99.1.0")
        events = client.attend()
        one = {"clients_per_round": 1, "min_clients": 1}
        server.create("new-only", min_client_version="99", round=one, stop={"rounds": 1})
        assert next(event for event in events if event.HasField("assignment")).assignment.key.run_id == "new-only"
        daemon = next(iter(fleet.daemons.values()))
        details = admin.call(admin_pb2.GetClientRequest(client_id=daemon.client_id), admin_pb2.GetClientResponse)
        (reason,) = [each for each in details.not_drawn if each.run_id == "new-only"]
        assert (reason.reason, "impetus 0." in reason.why) == ("version", True)
        assert "pip install --upgrade" in reason.remedy
        old = admin.clients.list_clients(older_than="99")
        assert {each.client_id for each in old} >= set(fleet.daemons)  # and clients of other tests
        assert "raw-new" not in {each.client_id for each in old}
        by_version = admin.clients.list_clients(order=admin_pb2.CLIENT_ORDER_VERSION)
        assert by_version[-1].client_id == "raw-new"
        found = run_program("fl_client", "doctor", "--config", str(daemon.config), "--json", folder=daemon.folder)
        said = [each for each in json.loads(found.stdout)["findings"] if each["check"] == "version"]
        assert [each["level"] for each in said] == ["WARN"]
        assert "expected impetus 99 or newer, which a run of this coordinator requires" in said[0]["said"]
