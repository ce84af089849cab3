"""How long a silent connection survives on the way to the coordinator: firewalls, NATs and balancers forget it."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from fl_client.settings.config import ClientConfig
from fl_client.setup.doctor import network
from fl_client.setup.doctor.findings import Finding, fail, ok, warn

SILENCES = (10.0, 20.0, 30.0)
"""Seconds. A daemon and its coordinator are silent for 30 s at most, or for `keepalive_s`, which is 20 at least."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADER = 9
"""Bytes of a frame's header: length (3), type (1), flags (1), stream (4) (RFC 9113, section 4.1)."""
_SETTINGS, _PING, _ACKNOWLEDGED = 4, 6, 1


def check(config: ClientConfig, silences: tuple[float, ...] = SILENCES) -> Iterator[Finding]:
    """Open one connection for each time, all at once, and ping the coordinator after its silence."""
    with ThreadPoolExecutor(len(silences)) as pool:
        alive = dict(zip(silences, pool.map(lambda seconds: _survives(config, seconds), silences), strict=True))
    lost = [seconds for seconds in silences if not alive[seconds]]
    if not lost:
        yield ok("idle", f"a silent connection survives {max(silences):g} s")
        return
    kept = max((seconds for seconds in silences if seconds < lost[0]), default=0.0)
    wanted = f"expected a silent connection to survive {config.keepalive_s:g} s"
    message = f"{wanted}, got one that was lost after {kept:g} to {lost[0]:g} s"
    if kept >= config.keepalive_s:
        yield ok("idle", f"a silent connection survives {kept:g} s, and keepalive_s is {config.keepalive_s:g}")
    elif kept >= silences[1]:
        yield warn("idle", message, f"set keepalive_s = {kept:g} in the settings")
    else:
        yield fail(
            "idle", message, "a firewall, NAT or load balancer on the way forgets it: it needs 60 s or more there"
        )


def _survives(config: ClientConfig, seconds: float) -> bool:
    """Whether the coordinator answers on a connection that was silent for this time."""
    try:
        with closing(_opened(config)) as connection:
            time.sleep(seconds)
            return _answers(connection)
    except OSError:
        return False


def _opened(config: ClientConfig) -> socket.socket:
    if config.tls is None:
        return network.open_connection(config)
    return network.open_channel(config, network.verifying(config.tls))


def _answers(connection: socket.socket) -> bool:
    """Ping the peer by HTTP/2. Raises OSError if the connection is broken, or nothing comes."""
    connection.settimeout(network.SECONDS)
    connection.sendall(_PREFACE + _frame(_SETTINGS) + _frame(_PING, b"fl-idle?"))
    came = b""
    while data := connection.recv(4096):
        came += data
        while len(came) >= _HEADER and len(came) >= (whole := _HEADER + int.from_bytes(came[:3], "big")):
            if came[3] == _PING and came[4] & _ACKNOWLEDGED:
                return True
            came = came[whole:]
    return False


def _frame(kind: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload
