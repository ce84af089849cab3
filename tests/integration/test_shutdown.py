"""How a coordinator ends: in good order within its grace, or at once, and what the next one finds."""

from __future__ import annotations

import signal

import grpc
import pytest

from tests.integration.harness import PRESENT, Coordinator, Daemon
from tests.integration.processes import eventually
from tests.integration.raw_client import HALF_BYTES, HaltedUpload, RawClient

ONE = {"clients_per_round": 1, "min_clients": 1}
AT_ONCE = 130


@pytest.fixture
def server(place):
    """A coordinator with all the time that an upload needs."""
    server = Coordinator(place, settings={"drain_grace_s": 50.0})
    server.forks = False
    return server.serve()


def test_an_upload_in_flight_is_finished_and_committed(server):
    """SIGTERM in mid-upload: the rest is taken, its round committed, nobody drawn any more, and the end is orderly."""
    with RawClient(server.address) as client:
        upload = HaltedUpload(server, client)
        server.signal(signal.SIGTERM)
        server.logged("draining")
        upload.goes_on.set()
        assert upload.receipt.result().receipt.admitted
    assert server.wait() == 0
    assert [event["round"] for event in server.events("round_committed")] == [0]
    assert [event["round"] for event in server.events("attempt_opened")] == [0]


def test_a_second_signal_leaves_an_upload_to_be_resumed(server):
    """Nobody waits for it: the process ends at once, and the next one has what was kept and takes the rest."""
    with RawClient(server.address) as client:
        upload = HaltedUpload(server, client)
        server.signal(signal.SIGTERM)
        server.logged("draining")
        assert server.exit_code is None
        server.signal(signal.SIGTERM)
        assert server.wait() == AT_ONCE
        upload.goes_on.set()
        assert isinstance(upload.receipt.exception(), grpc.RpcError)
        server.serve()
        eventually(lambda: _registered(client), "it can register again")
        assert upload.kept() == HALF_BYTES
        upload.update.header.session_id = client.session_id
        upload.update.header.resume_offset = HALF_BYTES
        assert client.submit(upload.update).admitted


def _registered(client):
    try:
        return client.register()
    except grpc.RpcError:
        return None


@pytest.fixture
def evaluating(place, request):
    """A coordinator of so much grace whose last round is committed, and whose evaluation of it does not end."""
    server = Coordinator(place, settings={"drain_grace_s": request.param, "health_listen": "127.0.0.1:0"})
    server.forks = False
    server.serve()
    daemon = Daemon(place, server, "edge-1").start()
    eventually(lambda: server.client("edge-1").state == PRESENT, "edge-1 attends")
    hold = place.folder / "evaluation.hold"
    hold.touch()
    server.create("slow", task={"options": {"hold_evaluation": str(hold)}}, round=ONE, stop={"rounds": 1})
    daemon.logged("trained", run="slow")
    server.logged("round_committed", run="slow")
    return server, hold


@pytest.mark.parametrize("evaluating", [0.2], indirect=True)
def test_what_does_not_end_in_the_grace_is_left(evaluating):
    """An evaluation holds the end up no longer than the grace; after a restart it is made up, and the run completes."""
    server, hold = evaluating
    assert server.terminate() == AT_ONCE
    assert server.events("leaving_at_once", why="the grace is over")
    hold.unlink()
    server.serve()
    assert server.completed("slow").rounds_done == 1


@pytest.mark.parametrize("evaluating", [600.0], indirect=True)
def test_a_second_signal_is_heard_by_who_waits_for_a_thread(evaluating):
    """A coordinator that answers nobody but probes, and cannot end before the computation does, ends at once."""
    server, _ = evaluating
    server.signal(signal.SIGTERM)
    server.logged("draining")
    eventually(lambda: not _answers(server.address), "its port for clients is closed")
    assert server.exit_code is None
    assert _answers(server.settings["health_listen"])
    server.signal(signal.SIGTERM)
    assert server.wait() == AT_ONCE


def _answers(address):
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=0.5)
        except grpc.FutureTimeoutError:
            return False
        return True
