"""Health probes of a coordinator: before it is ready, while it serves, and while it stops."""

from __future__ import annotations

import json
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc
from tests.processes.certificates import Pki
from tests.processes.federation import Coordinator, SecureCoordinator
from tests.processes.process import TIMEOUT_S, Workspace, eventually
from tests.processes.raw_client import HaltedUpload, RawClient

READY = {"": "SERVING", "fl.v1.Coordinator": "SERVING", "live": "SERVING"}
ALIVE = {"": "NOT_SERVING", "fl.v1.Coordinator": "NOT_SERVING", "live": "SERVING"}


def probed(address: str) -> dict[str, str]:
    """Status of each service, queried like a kubelet: in plain text on a new connection."""
    with grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answers = {name: check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S).status for name in READY}
    return {name: health_pb2.HealthCheckResponse.ServingStatus.Name(status) for name, status in answers.items()}


@pytest.fixture
def server(workspace: Workspace) -> Coordinator:
    """A coordinator with a port for probes."""
    return Coordinator(workspace, settings={"health_listen": "127.0.0.1:0", "drain_grace_s": 50.0}).serve()


def test_recovery_is_alive_and_not_ready(server: Coordinator, workspace: Workspace) -> None:
    """While runs are restored the process is alive; it is ready when all runs are restored."""
    hold = workspace.folder / "model.hold"
    server.create("slow", task={"options": {"hold_model": str(hold)}})
    assert server.terminate() == 0
    hold.touch()
    server.start()
    address = server.logged("starting", count=2)["health_listen"]
    assert probed(address) == ALIVE
    hold.unlink()
    server.logged("serving", count=2)
    assert probed(address) == READY


def test_the_first_line_of_the_log_is_the_start(server: Coordinator, workspace: Workspace) -> None:
    """Not a warning about open files or ports. The whole output is lines of JSON."""
    lines = [json.loads(line) for line in (workspace.folder / f"{server.name}.out").read_text().splitlines()]
    assert lines[0]["event"] == "starting"
    assert [line["event"] for line in lines].count("serving") == 1


def test_a_signal_during_recovery_is_the_end_of_readiness(server: Coordinator, workspace: Workspace) -> None:
    """A coordinator that is stopped before it is ready exits with 0 and never reports that it is ready."""
    hold = workspace.folder / "model.hold"
    server.create("slow", task={"options": {"hold_model": str(hold)}})
    assert server.terminate() == 0
    hold.touch()
    server.start()
    address = server.logged("starting", count=2)["health_listen"]
    with grpc.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        seen = [next(watch).status]
        server.signal(signal.SIGTERM)
        hold.unlink()
        with pytest.raises(grpc.RpcError):
            seen.extend(answer.status for answer in watch)
    assert server.wait() == 0
    assert set(seen) == {health_pb2.HealthCheckResponse.NOT_SERVING}


def test_a_drain_is_alive_and_not_ready(server: Coordinator) -> None:
    """From SIGTERM on not ready, and alive as long as an upload is awaited; the last port to close is this one."""
    address = server.settings["health_listen"]
    assert probed(address) == READY
    with RawClient(server.address) as client:
        upload = HaltedUpload(server, client)
        server.signal(signal.SIGTERM)
        server.logged("draining")
        assert probed(address) == ALIVE
        assert not upload.receipt.done()
        upload.goes_on.set()
        assert upload.receipt.result().receipt.admitted
    assert server.wait() == 0


def test_the_probes_port_serves_nothing_else(workspace: Workspace) -> None:
    """The plain-text port next to TLS answers a kubelet and no client."""
    server = SecureCoordinator(workspace, Pki(workspace.folder / "pki"), {"health_listen": "127.0.0.1:0"}).serve()
    address = server.settings["health_listen"]
    eventually(lambda: probed(address) == READY, "it is ready")
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        coordinator_pb2_grpc.CoordinatorStub(channel).Register(pb.RegisterRequest(), timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_taken_port_for_probes_is_named(server: Coordinator, workspace: Workspace) -> None:
    """Exit code 2 and the setting's name, before the state directory is touched."""
    other = Coordinator(workspace, "other", {"health_listen": server.settings["health_listen"]}).start()
    assert other.wait() == 2
    assert "health_listen: cannot listen on" in other.errors()
    assert not (workspace.folder / "other-state").exists()
