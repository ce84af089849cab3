"""The end of a coordinator: within its grace or at once, and the start of the next one."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import pytest

from protos.fl.v1 import coordinator_pb2 as pb
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace, eventually
from tests.processes.raw_client import HALF_BYTES, HaltedUpload, RawClient

ONE = {"clients_per_round": 1, "min_clients": 1}
AT_ONCE = 130


@pytest.fixture
def server(workspace: Workspace) -> Coordinator:
    """A coordinator with all the time that an upload needs."""
    return Coordinator(workspace, settings={"drain_grace_s": 50.0}).serve()


@pytest.fixture
def unforked_server(workspace: Workspace) -> Coordinator:
    """The same as a process that is not forked, which ends with the interpreter's shutdown."""
    server = Coordinator(workspace, settings={"drain_grace_s": 50.0})
    server.forks = False
    return server.serve()


@pytest.mark.slow
def test_an_upload_in_flight_is_finished_and_committed(unforked_server: Coordinator) -> None:
    """After SIGTERM during an upload the rest is received, the round committed, no client drawn; exit code 0."""
    server = unforked_server
    with RawClient(server.address) as client:
        upload = HaltedUpload(server, client)
        server.signal(signal.SIGTERM)
        server.logged("draining")
        upload.goes_on.set()
        assert upload.receipt.result().receipt.admitted
    assert server.wait() == 0
    assert [event["round"] for event in server.events("round_committed")] == [0]
    assert [event["round"] for event in server.events("attempt_opened")] == [0]


def test_a_second_signal_leaves_an_upload_to_be_resumed(server: Coordinator) -> None:
    """The process ends at once. The next one has the received bytes and gets the rest."""
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


def _registered(client: RawClient) -> pb.RegisterResponse | None:
    try:
        return client.register()
    except grpc.RpcError:
        return None


@pytest.fixture
def evaluating(workspace: Workspace) -> tuple[Coordinator, Path]:
    """A coordinator with a long drain grace; its last round is committed, and its evaluation does not end."""
    server = Coordinator(workspace, settings={"drain_grace_s": 600.0, "health_listen": "127.0.0.1:0"})
    server.serve()
    daemon = Daemon(workspace, server, "edge-1").start()
    server.until_present("edge-1")
    hold = workspace.folder / "evaluation.hold"
    hold.touch()
    server.create("slow", task={"options": {"hold_evaluation": str(hold)}}, round=ONE, stop={"rounds": 1})
    daemon.logged("trained", run="slow")
    server.logged("round_committed", run="slow")
    return server, hold


def test_an_evaluation_in_a_process_of_its_own_delays_no_end(evaluating: tuple[Coordinator, Path]) -> None:
    """A task from outside is evaluated in its own process, which ends; a restart repeats the evaluation."""
    server, hold = evaluating
    assert server.terminate() == 0
    hold.unlink()
    server.serve()
    assert server.completed("slow").rounds_done == 1


def _answers(address: str, within_s: float) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=within_s)
        except grpc.FutureTimeoutError:
            return False
        return True
