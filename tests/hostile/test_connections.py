"""Attacks by connections, streams and message sizes on a coordinator with few file descriptors."""

from __future__ import annotations

import resource
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from fl_server.rpc import methods
from protos.fl.v1 import errors_pb2
from protos.status import detail_of
from tests.hostile.attacks import empty_pending, half_open_metrics, health_names, silent_connections
from tests.hostile.federation import Federation, Memory
from tests.hostile.target import for_seconds, target, under
from tests.marks import slow_except
from tests.processes.certificates import Pki, credentials
from tests.processes.process import TIMEOUT_S, Workspace, eventually
from tests.processes.raw_client import RawClient

OPEN_FILES = 256
MOST_MIB = 100
"""Allowed growth of memory under an attack that once took gigabytes."""
ATTACK_S = 3.0
HANDSHAKES = 25
OTHER_PORTS = ("/fl.v1.WebLogin/", "/fl.v1.Workers/")
METHODS = [method for method in methods.METHODS if method.startswith("/fl.v1.") and not method.startswith(OTHER_PORTS)]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """A coordinator that may open OPEN_FILES files, and three honest daemons."""
    with Workspace(tmp_path_factory.mktemp("connections")) as workspace:
        yield Federation(workspace, open_files=OPEN_FILES, connections={"handshake_s": 2.0})


@pytest.mark.slow
def test_long_names_of_services_need_no_memory(federation: Federation, undisturbed: list[str]) -> None:
    """100 watches of services with names of 4.8 MB each, without a certificate, again and again."""
    memory, run = Memory(federation.server.pid), federation.begin_run()
    memory.forget_peak()
    before = memory.now()
    health_names.attack(target(federation), for_seconds(ATTACK_S))
    assert memory.peak() - before < MOST_MIB
    federation.still_works(undisturbed, run)


@pytest.mark.slow
@pytest.mark.parametrize("banned", slow_except([True, False], False), ids=["banned", "unknown"])
def test_millions_of_empty_entries_need_no_memory(federation: Federation, undisturbed: list[str], banned: bool) -> None:
    """20 registrations at once with 2.4 million empty entries each, whether or not the client is let in."""
    memory, name, run = Memory(federation.server.pid), f"registers-{banned}".lower(), federation.begin_run()
    if banned:
        with federation.server.admin() as admin:
            admin.clients.ban_client(name, "a test")
    memory.forget_peak()
    before = memory.now()
    empty_pending.attack(target(federation, name), for_seconds(ATTACK_S))
    assert memory.peak() - before < MOST_MIB
    federation.still_works(undisturbed, run)
    code = "PERMISSION_DENIED" if banned else "INVALID_ARGUMENT"
    refused = federation.server.events("rpc_refused", rpc="Register", code=code, caller=f"client:{name}")
    assert refused[0]["peer"].startswith("127.0.0.1:")


@pytest.mark.slow
def test_silent_connections_stop_no_client(federation: Federation, undisturbed: list[str]) -> None:
    """With more of them than file descriptors the run ends with its bits, and new clients are accepted afterwards."""
    with under(silent_connections.attack, target(federation)):
        full = federation.server.logged("connections_full", port="listen")
        assert full["connected"].keys() == {"127.0.0.1"}
        federation.still_works(undisturbed, federation.begin_run())
    with federation.raw("comes-after") as client:
        eventually(lambda: _registered(client), "a newcomer is let in")


@pytest.mark.slow
def test_refused_handshakes_are_logged(federation: Federation) -> None:
    """A log line and a metric. Certificates of another authority fail in the handshake."""
    eve = Pki(federation.workspace.folder / "another-authority").issue("client", "eve")
    host, _, port = federation.server.settings["admin_listen"].rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(federation.pki.ca)
    context.load_cert_chain(eve.cert, eve.key)
    context.set_alpn_protocols(["h2"])
    for _ in range(HANDSHAKES):
        with (
            suppress(OSError),
            socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection,
            context.wrap_socket(connection, server_hostname=host) as secure,
        ):
            secure.recv(1)
    assert federation.server.logged("handshakes_failed", port="admin_listen")["handshakes"]
    counted = "fl_tls_handshakes_failed_total", {"port": "admin_listen"}
    eventually(lambda: _sample(federation, *counted) >= HANDSHAKES, "all are counted")


def rpc(method: Any) -> Any:
    """A method without serializers, which sends and receives bytes."""
    return method


def _registered(client: RawClient) -> str | None:
    try:
        return client.register().session_id
    except grpc.RpcError:
        return None


def test_half_open_requests_for_metrics_need_no_threads(federation: Federation) -> None:
    """With 400 of them the number of threads stays the same, and a scrape is answered."""
    threads = len(list(Path(f"/proc/{federation.server.pid}/task").iterdir()))
    with under(half_open_metrics.attack, target(federation)):
        for _ in range(5):
            assert "fl_build_info" in eventually(lambda: _scraped(federation), "a scrape is answered")
        assert len(list(Path(f"/proc/{federation.server.pid}/task").iterdir())) <= threads + 8


def _scraped(federation: Federation) -> str | None:
    address = federation.server.settings["metrics_listen"]
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as page:
            return str(page.read().decode())
    except OSError:
        return None


def caller_of(method: str) -> tuple[str, str]:
    """The role of a method's callers, and the setting of its port."""
    if "Admin" in method:
        return "admin", "admin_listen"
    return "client", "enroll_listen" if "Enrollment" in method else "listen"


@pytest.mark.parametrize("method", METHODS)
def test_invalid_requests_are_refused_in_one_line(federation: Federation, method: str) -> None:
    """Every method of all services does so, and no reply looks like an internal error."""
    role, port = caller_of(method)
    with grpc.secure_channel(
        federation.server.settings[port], credentials(federation.hostile("garbles", role))
    ) as channel:
        for garbage in (b"\xff\xff\xff", b"\x0a\x05ab"):
            with pytest.raises(grpc.RpcError) as caught:
                list(rpc(channel.stream_stream(method))(iter([garbage]), timeout=TIMEOUT_S))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "\n" not in str(caught.value.details())
    assert not federation.server.events("rpc_failed")
    assert "Traceback" not in federation.server.errors()


@pytest.mark.parametrize("method", [method for method in METHODS if "SubmitUpdate" not in method])
def test_a_request_over_its_methods_size_is_refused(federation: Federation, method: str) -> None:
    """It is refused before parsing, with a message that has the limit."""
    role, port = caller_of(method)
    size, name = methods.METHODS[method].limit.size_bytes, f"exceeds-{METHODS.index(method)}"
    with grpc.secure_channel(federation.server.settings[port], credentials(federation.hostile(name, role))) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(rpc(channel.stream_stream(method))(iter([b"\x0a" + b"x" * size]), timeout=TIMEOUT_S))
        if caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
            assert "larger than max" in str(caught.value.details())  # the port's own limit came first
        else:
            assert f"at most {size} bytes in {method.rpartition('/')[2]}" in str(caught.value.details())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.slow
def test_manifests_of_millions_of_tensors_need_no_memory(federation: Federation, undisturbed: list[str]) -> None:
    """20 uploads at once with manifests of two bytes an entry; an honest run keeps its bits."""
    memory, run = Memory(federation.server.pid), federation.begin_run()
    entries = b"\x0a\x00" * 2_000_000
    for tag in (b"\x12", b"\x22", b"\x0a"):  # a manifest, a payload, the header: each a message with a size before it
        entries = tag + _varint(len(entries)) + entries
    memory.forget_peak()
    before = memory.now()
    with target(federation, "tables").channel() as channel:
        calls = [
            rpc(channel.stream_unary("/fl.v1.Coordinator/SubmitUpdate")).future(iter([entries]), timeout=TIMEOUT_S)
            for _ in range(20)
        ]
        errors = [call.exception() for call in calls]
    # The first ones are refused for their content, the rest because of the first.
    assert {error.code() for error in errors} == {
        grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED,
    }  # fmt: skip
    assert "request: expected at most 32,768 values in SubmitUpdate; send fewer entries, got more" in {
        error.details() for error in errors
    }
    assert memory.peak() - before < MOST_MIB
    federation.still_works(undisturbed, run)


def _varint(value: int) -> bytes:
    groups = []
    while value >> 7:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def test_a_caller_with_too_many_calls_gets_a_retry_time(federation: Federation) -> None:
    """RESOURCE_EXHAUSTED with a wait, counted by port; the calls that are open stay open."""
    with grpc.secure_channel(
        federation.server.settings["admin_listen"], credentials(federation.hostile("watches", "admin"))
    ) as channel:
        over = threading.Event()
        silent = [
            rpc(channel.stream_unary("/fl.v1.Admin/ListRuns")).future(_never(over), timeout=TIMEOUT_S)
            for _ in range(33)
        ]
        refused = eventually(lambda: [call for call in silent if call.done()], "one is too many")
        assert refused[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(detail_of(refused[0].trailing_metadata()), errors_pb2.RetryLater)
        assert len(refused) == 1
        over.set()
    labels = {"port": "admin_listen", "reason": "calls"}
    assert _sample(federation, "fl_requests_refused_total", labels) >= 1


def _never(over: threading.Event) -> Iterator[bytes]:
    over.wait(TIMEOUT_S)
    yield b""


def _sample(federation: Federation, name: str, labels: dict[str, str]) -> float:
    families = text_string_to_metric_families(eventually(lambda: _scraped(federation), "a scrape is answered"))
    samples = (sample for family in families for sample in family.samples)
    return next(sample.value for sample in samples if (sample.name, sample.labels) == (name, labels))


def test_an_unknown_service_is_not_watched(federation: Federation) -> None:
    """The probe is refused, the stream ends, and the name is not kept."""
    with grpc.insecure_channel(federation.server.settings["health_listen"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answers = list(stub.Watch(health_pb2.HealthCheckRequest(service="unknown"), timeout=TIMEOUT_S))
        assert [answer.status for answer in answers] == [health_pb2.HealthCheckResponse.SERVICE_UNKNOWN]
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="unknown"), timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_is_off(federation: Federation) -> None:
    """Reflection is off by default, also for clients with a certificate."""
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    with target(federation).channel() as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(rpc(channel.stream_stream(method))(iter([b""]), timeout=TIMEOUT_S))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.slow
def test_a_run_continues_when_descriptors_are_free_again(federation: Federation, undisturbed: list[str]) -> None:
    """Without free descriptors updates are refused with a message; the run then ends with its bits."""
    server, run = federation.server, federation.begin_run()
    open_now = {int(each.name) for each in Path(f"/proc/{server.pid}/fd").iterdir()}
    lowest = next(number for number in range(OPEN_FILES) if number not in open_now)
    _, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (lowest, OPEN_FILES))
    try:
        refused = server.logged("rpc_refused", rpc="SubmitUpdate", code="UNAVAILABLE")
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (hard, hard))
    assert "Too many open files" in refused["error"]
    assert "see who holds connections" in refused["error"]
    federation.still_works(undisturbed, run)
