"""The HTTP server for Prometheus: the responses of the library's own server, with limits on connections."""

from __future__ import annotations

import gzip
import http.client
import socket
import threading
from collections.abc import Iterator
from email.message import Message

import pytest
from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.core import Metric

from fl_common.metrics import serve_metrics
from fl_common.metrics_server import MAX_REQUEST_BYTES, ServerLimits, respond
from tests.processes.process import TIMEOUT_S, eventually

LIMITS = ServerLimits(connections=4, seconds=20.0)


@pytest.fixture
def registry() -> CollectorRegistry:
    """One with a counter."""
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    return registry


@pytest.fixture
def port(registry: CollectorRegistry) -> Iterator[int]:
    """Of a server of the registry."""
    with serve_metrics(registry, ("127.0.0.1", 0), LIMITS) as port:
        yield port


def got(port: int, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, Message, bytes]:
    """Status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        connection.request(method, "/metrics", headers=headers or {})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def test_a_scrape_is_answered(port: int) -> None:
    """As plain text; compressed where that is asked for."""
    status, _, body = got(port)
    assert (status, b"things_total 3.0" in body) == (200, True)
    _, headers, body = got(port, headers={"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert b"things_total 3.0" in gzip.decompress(body)


@pytest.mark.parametrize(("method", "status"), [("HEAD", 405), ("OPTIONS", 200), ("POST", 405)])
def test_other_methods(port: int, method: str, status: int) -> None:
    """What reads is answered, nothing else."""
    assert got(port, method)[0] == status


def test_silent_connections_are_pushed_out(port: int) -> None:
    """With more of them than the limit a scrape is still answered, and they take no thread."""
    threads = threading.active_count()
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
    try:
        assert got(port)[0] == 200
        assert threading.active_count() == threads
    finally:
        for connection in held:
            connection.close()


def test_a_connection_has_its_time(registry: CollectorRegistry) -> None:
    """One that never ends its request is closed."""
    with (
        serve_metrics(registry, ("127.0.0.1", 0), ServerLimits(connections=4, seconds=0.1)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as held,
    ):
        held.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert held.recv(100) == b""


def test_a_request_without_an_end_is_refused(port: int) -> None:
    """Before it takes memory."""
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as held:
        held.sendall(b"GET /" + b"x" * MAX_REQUEST_BYTES)
        assert held.recv(100).startswith(b"HTTP/1.0 431 ")


@pytest.mark.parametrize("head", [b"", b"GET", b"\xff\xff \r\n", b"GET / HTTP/1.1 more"])
def test_what_is_no_request_is_refused(head: bytes) -> None:
    """In HTTP's own words."""
    assert respond(lambda *_: [], head).startswith(b"HTTP/1.0 400 ")


def test_a_failing_collector_does_not_end_the_port(
    registry: CollectorRegistry, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scrape fails, and the next one is answered."""

    class Broken:
        broken = True

        def collect(self) -> Iterator[Metric]:
            if self.broken:
                raise RuntimeError("broken")
            return iter(())

    broken = Broken()
    broken.broken = False
    registry.register(broken)
    broken.broken = True
    assert got(port)[0] == 500
    broken.broken = False
    assert got(port)[0] == 200
    assert "broken" in capfd.readouterr().err


def test_a_port_that_is_taken_is_an_error(registry: CollectorRegistry, port: int) -> None:
    """The caller reports the setting."""
    with pytest.raises(OSError, match="in use"), serve_metrics(registry, ("127.0.0.1", port)):
        pass


def test_the_librarys_server_keeps_a_thread_for_each_connection(registry: CollectorRegistry) -> None:
    """Silent connections hold threads without a limit, so our own server stays; without this, it could go."""
    before, silent = threading.active_count(), 8
    server, thread = start_http_server(0, "127.0.0.1", registry)
    connections = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(silent)]
    try:
        eventually(lambda: threading.active_count() == before + 1 + silent, "each connection has a thread")
    finally:
        for connection in connections:
            connection.close()
        server.shutdown()
        server.server_close()
        thread.join()
