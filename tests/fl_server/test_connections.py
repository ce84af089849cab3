"""Who holds connections, as the kernel knows it, and what is said of it."""

from __future__ import annotations

import socket
from collections import Counter

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from fl_server.metrics import Metrics
from fl_server.rpc.connections import MANY_UNUSED, TELL_S, ConnectionWatch, connections_to

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
def metrics():
    """Metrics in a registry of their own."""
    return Metrics(CollectorRegistry())


def test_established_connections_are_counted_by_port_and_address(tmp_path):
    """Not those that listen, wait to be forgotten, or are to other ports; IPv4 in IPv6 is IPv4."""
    tables = [tmp_path / "tcp", tmp_path / "tcp6", tmp_path / "missing"]
    tables[0].write_text(TABLE)
    tables[1].write_text(TABLE6)
    found = connections_to([0x1B9E], tables)
    assert found == {0x1B9E: Counter({"10.0.0.7": 2, "10.0.0.9": 1, "2001:db8::1": 1})}


def test_a_silent_connection_is_seen():
    """In the kernel's own table."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        port = server.getsockname()[1]
        assert connections_to([port]) == {port: Counter({"127.0.0.1": 1})}


def test_a_full_port_is_told_once_a_minute(metrics):
    """With who holds most of it, and what to do."""
    watch = ConnectionWatch({"listen": "127.0.0.1:7070"}, {"listen": 3}, metrics)
    holders = Counter({"10.0.0.7": 2, "10.0.0.8": 1})
    with capture_logs() as logs:
        for now in (0.0, 5.0, TELL_S - 1, TELL_S):
            watch.look({7070: holders}, now)
    assert [line["event"] for line in logs] == ["connections_full"] * 2
    assert (logs[0]["port"], logs[0]["connections"], logs[0]["connected"]) == ("listen", 3, dict(holders))
    value = metrics.registry.get_sample_value
    assert [value(name, {"port": "listen"}) for name in ("fl_connections", "fl_connections_limit")] == [3, 3]


def test_handshakes_that_come_to_no_call_are_told(metrics):
    """Many within a minute are a line; those that make calls are not among them."""
    watch = ConnectionWatch({"listen": "127.0.0.1:7070"}, {"listen": 300}, metrics)
    begun, used = metrics.handshakes.labels("listen"), metrics.connections_used.labels("listen")
    with capture_logs() as logs:
        for now, handshakes, calls in ((0.0, 1, 1), (5.0, 50, 50), (10.0, MANY_UNUSED, 0), (15.0, MANY_UNUSED, 0)):
            begun.inc(handshakes)
            used.inc(calls)
            watch.look({7070: Counter({"10.0.0.7": 1})}, now)
    assert [(line["event"], line["handshakes"]) for line in logs] == [("handshakes_without_calls", MANY_UNUSED)]
