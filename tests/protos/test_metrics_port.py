"""The port for Prometheus: as the library's own server answers, with bounds on who waits."""

from __future__ import annotations

import gzip
import http.client
import socket
import threading

import pytest
from prometheus_client import CollectorRegistry, Counter

from protos.metrics import listening
from protos.metrics_port import MOST_REQUEST_BYTES, Serving, answer

LIMITS = Serving(connections=4, seconds=20.0)


@pytest.fixture
def registry():
    """One with a counter."""
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc(3)
    return registry


@pytest.fixture
def port(registry):
    """Of a server of the registry."""
    with listening(registry, "127.0.0.1", 0, LIMITS) as port:
        yield port


def got(port, method="GET", headers=None):
    """Status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, "/metrics", headers=headers or {})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def test_a_scrape_is_answered(port):
    """As plain text; compressed where that is asked for."""
    status, _, body = got(port)
    assert (status, b"things_total 3.0" in body) == (200, True)
    _, headers, body = got(port, headers={"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert b"things_total 3.0" in gzip.decompress(body)


@pytest.mark.parametrize(("method", "status"), [("HEAD", 405), ("OPTIONS", 200), ("POST", 405)])
def test_other_methods(port, method, status):
    """What reads is answered, nothing else."""
    assert got(port, method)[0] == status


def test_silent_connections_are_pushed_out(port):
    """More of them than there is room for: a scrape is answered, and no thread is taken."""
    threads = threading.active_count()
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
    try:
        assert got(port)[0] == 200
        assert threading.active_count() == threads
    finally:
        for each in held:
            each.close()


def test_a_connection_has_its_time(registry):
    """One that never ends its request is closed."""
    with (
        listening(registry, "127.0.0.1", 0, Serving(connections=4, seconds=0.1)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as held,
    ):
        held.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert held.recv(100) == b""


def test_a_request_without_an_end_is_refused(port):
    """Before it takes memory."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as held:
        held.sendall(b"GET /" + b"x" * MOST_REQUEST_BYTES)
        assert held.recv(100).startswith(b"HTTP/1.0 431 ")


@pytest.mark.parametrize("head", [b"", b"GET", b"\xff\xff \r\n", b"GET / HTTP/1.1 more"])
def test_what_is_no_request_is_refused(head):
    """In HTTP's own words."""
    assert answer(lambda *_: [], head).startswith(b"HTTP/1.0 400 ")


def test_a_failing_collector_does_not_end_the_port(registry, port, capfd):
    """A scrape fails, and the next one is answered."""

    class Broken:
        broken = True

        def collect(self):
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


def test_a_port_that_is_taken_is_an_error(registry, port):
    """The program says which setting, and ends."""
    with pytest.raises(OSError, match="in use"), listening(registry, "127.0.0.1", port):
        pass
