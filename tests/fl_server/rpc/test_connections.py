"""Connections by port and address from the kernel's table, and the logs about them."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from fl_server.metrics import Metrics
from fl_server.rpc.listening import (
    FEW_LOG_S,
    LOG_S,
    MANY_FAILED,
    SETTLED_S,
    ConnectionWatch,
    connections_to,
)

TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1B9E 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 0100007F:1B9E 0700000A:C350 01 00000000:00000000 00:00000000 00000000     0        0 2 1
   2: 0100007F:1B9E 0700000A:C351 01 00000000:00000000 00:00000000 00000000     0        0 3 1
   3: 0100007F:1B9E 0800000A:C352 06 00000000:00000000 00:00000000 00000000     0        0 4 1
   4: 0100007F:1B9F 0800000A:C353 01 00000000:00000000 00:00000000 00000000     0        0 5 1
"""
TABLE6 = """  sl  local_address                         remote_address                        st
   0: 0000000000000000FFFF00000100007F:1B9E 0000000000000000FFFF00000900000A:C350 01 0 0
   1: 00000000000000000000000001000000:1B9E B80D0120000000000000000001000000:C351 01 0 0
"""


@pytest.fixture
def metrics() -> Metrics:
    """Metrics in a registry of their own."""
    return Metrics(CollectorRegistry())


def test_established_connections_are_counted_by_port_and_address(tmp_path: Path) -> None:
    """Without sockets that listen, wait to close, or use other ports; IPv4 in IPv6 counts as IPv4."""
    tables = [tmp_path / "tcp", tmp_path / "tcp6", tmp_path / "missing"]
    tables[0].write_text(TABLE)
    tables[1].write_text(TABLE6)
    found = connections_to([0x1B9E], tables)
    assert found == {0x1B9E: Counter({"10.0.0.7": 2, "10.0.0.9": 1, "2001:db8::1": 1})}


def test_a_silent_connection_is_seen() -> None:
    """In the kernel's own table."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        port = server.getsockname()[1]
        assert connections_to([port]) == {port: Counter({"127.0.0.1": 1})}


def test_a_full_port_is_logged_once_a_minute(metrics: Metrics) -> None:
    """With the address that has the most connections, and the remedy."""
    watch = ConnectionWatch({"listen": "127.0.0.1:7070"}, {"listen": 3}, metrics)
    holders = Counter({"10.0.0.7": 2, "10.0.0.8": 1})
    with capture_logs() as logs:
        for now in (0.0, 5.0, LOG_S - 1, LOG_S):
            watch.check({7070: holders}, now)
    assert [line["event"] for line in logs] == ["connections_full"] * 2
    assert (logs[0]["port"], logs[0]["connections"], logs[0]["connected"]) == ("listen", 3, dict(holders))
    value = metrics.registry.get_sample_value
    assert [value(name, {"port": "listen"}) for name in ("fl_connections", "fl_connections_limit")] == [3, 3]


def failed(metrics: Metrics) -> float | None:
    """The counted failures at the clients' port."""
    return metrics.registry.get_sample_value("fl_tls_handshakes_failed_total", {"port": "listen"})


def test_handshakes_without_calls_are_counted_and_logged(metrics: Metrics) -> None:
    """Connections with calls are not counted, nor handshakes that may still be under way; a first failure is logged."""
    watch = ConnectionWatch({"listen": "127.0.0.1:7070"}, {"listen": 300}, metrics)
    counts = []
    with capture_logs() as logs:
        for now, handshakes, calls in ((0.0, 1, 1), (5.0, 50, 49), (10.0, 3, 0), (20.0, 0, 0), (25.0, 0, 3)):
            metrics.handshakes.labels("listen").inc(handshakes)
            metrics.connections_used.labels("listen").inc(calls)
            watch.check({7070: Counter({"10.0.0.7": 1})}, now)
            counts.append(failed(metrics))
    assert counts == [0, 0, 0, 1, 1]
    assert [(line["event"], line["handshakes"]) for line in logs] == [("handshakes_failed", 1)]
    assert "certificate has expired or is of another authority" in logs[0]["todo"]
    assert "fl-client doctor" in logs[0]["todo"]


@pytest.mark.parametrize(("each_time", "lines"), [(1, 3), (MANY_FAILED, 11)], ids=["few", "many"])
def test_repeated_failures_are_logged_once_in_a_while(metrics: Metrics, each_time: int, lines: int) -> None:
    """One device that retries is a line for each twenty failures; many are a line a minute, each with their number."""
    watch = ConnectionWatch({"listen": "127.0.0.1:7070"}, {"listen": 300}, metrics)
    with capture_logs() as logs:
        for now in range(0, int(FEW_LOG_S + SETTLED_S) + 1, 15):
            metrics.handshakes.labels("listen").inc(each_time)
            watch.check({7070: Counter()}, float(now))
    assert len(logs) == lines
    assert sum(line["handshakes"] for line in logs) == failed(metrics)
