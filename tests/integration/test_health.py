"""What probes see of a coordinator: before it is ready, while it serves, and while it leaves."""

from __future__ import annotations

import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import coordinator_pb2_grpc
from tests.integration.harness import Coordinator
from tests.integration.processes import command, eventually
from tests.integration.raw_client import HaltedUpload, RawClient

READY = {"": "SERVING", "fl.v1.Coordinator": "SERVING", "live": "SERVING"}
ALIVE = {"": "NOT_SERVING", "fl.v1.Coordinator": "NOT_SERVING", "live": "SERVING"}


def probed(address):
    """What each service is said to be, as a kubelet asks: in plain text, on a connection of its own."""
    with grpc.insecure_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answers = {name: check(health_pb2.HealthCheckRequest(service=name), timeout=20).status for name in READY}
    return {name: health_pb2.HealthCheckResponse.ServingStatus.Name(status) for name, status in answers.items()}


@pytest.fixture
def server(place):
    """A coordinator with a port for probes."""
    return Coordinator(place, settings={"health_listen": "127.0.0.1:0", "drain_grace_s": 50.0}).serve()


def test_recovery_is_alive_and_not_ready(server, place):
    """While a run is read back the process says that it lives, and ready only when all runs are back."""
    hold = place.folder / "model.hold"
    server.create("slow", task={"options": {"hold_model": str(hold)}})
    assert server.terminate() == 0
    hold.touch()
    server.start()
    address = server.logged("starting", count=2)["health_listen"]
    assert probed(address) == ALIVE
    hold.unlink()
    server.logged("serving", count=2)
    assert probed(address) == READY


def test_a_signal_during_recovery_is_the_end_of_readiness(server, place):
    """A coordinator that was told to leave before it was ready ends in good order, and never says that it is ready."""
    hold = place.folder / "model.hold"
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


def test_a_drain_is_alive_and_not_ready(server):
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


def test_the_probes_port_serves_nothing_else(place):
    """Plain text beside TLS: a kubelet is answered there, a client is not."""
    for arguments in (("init",), ("issue", "server", "--host", "127.0.0.1")):
        assert command("ca", *arguments, folder=place.folder).returncode == 0
    pki = place.folder / "pki"
    files = {"cert": pki / "server-coordinator.crt", "key": pki / "server-coordinator.key", "client_ca": pki / "ca.crt"}
    settings = {"insecure": False, "tls": files, "health_listen": "127.0.0.1:0"}
    server = Coordinator(place, settings=settings).serve()
    address = server.settings["health_listen"]
    eventually(lambda: probed(address) == READY, "it is ready")
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        coordinator_pb2_grpc.CoordinatorStub(channel).Register(pb.RegisterRequest(), timeout=20)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_taken_port_for_probes_is_named(server, place):
    """Exit code 2 and the setting's name, before the state directory is touched."""
    other = Coordinator(place, "other", {"health_listen": server.settings["health_listen"]}).start()
    assert other.wait() == 2
    assert "health_listen: cannot listen on" in other.errors()
    assert not (place.folder / "other-state").exists()
