"""Watches the connections to the coordinator's ports in the kernel's table, including those that never make a call.

grpc reports neither failed handshakes nor connections that it closed for a limit. Available are the kernel's table of
TCP connections, the number of handshakes that began, and the number of connections that made a first call. A handshake
that no call has followed for a while has failed, or its connection is of no use.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from pathlib import Path

import structlog

from fl_common.settings import split_address
from fl_server.metrics import CERTIFICATE_PORTS, Metrics

log = structlog.get_logger()

CHECK_S = 5.0
LOG_S = 60.0
"""Least time between two log lines about a port."""
MOST_SHOWN = 3
"""Addresses in a log line: those with the most connections."""
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
_CONNECTION = re.compile(rf"^ *\d+: [0-9A-F]+:([0-9A-F]{{4}}) ([0-9A-F]+):[0-9A-F]{{4}} {_ESTABLISHED} ", re.MULTILINE)
"""A line of a table: the local port and the remote address."""
_PIECE = 64 << 10
SETTLED_S = 15.0
"""A handshake without a call for so long has failed. One that takes longer is counted too early."""
MANY_FAILED = 20
"""Failed handshakes from which on the next line is due after LOG_S."""
FEW_LOG_S = 600.0
"""Least time between two lines about fewer."""


def connections_to(ports: Iterable[int], tables: Iterable[Path] = _TABLES) -> dict[int, Counter[str]]:
    """The number of connections from each address, by local port. Blocking; empty on other systems than Linux."""
    connected: dict[int, Counter[str]] = {port: Counter() for port in ports}
    for table in tables:
        try:
            counts = _connections(table)
        except OSError:
            continue  # not Linux; no IPv6; or no open file is left, which is reported elsewhere
        for (digits, remote), count in counts.items():
            if (port := int(digits, 16)) in connected:
                connected[port][_address(remote)] += count
    return connected


def _connections(table: Path) -> Counter[tuple[str, str]]:
    """Open connections by local port and remote address, as the kernel writes them.

    Read in pieces, for one search holds the interpreter, and a fleet of ten thousand has megabytes of lines.
    """
    counts: Counter[tuple[str, str]] = Counter()
    with table.open() as lines:
        while piece := lines.readlines(_PIECE):
            counts.update(_CONNECTION.findall("".join(piece)))
    return counts


def _address(digits: str) -> str:
    """An address in the kernel's format: words of four bytes in the machine's order, little-endian on our platforms."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


class ConnectionWatch:
    """Counts connections for Prometheus, and logs when a port has no more of them."""

    def __init__(self, addresses: Mapping[str, str], limits: Mapping[str, int], metrics: Metrics) -> None:
        """addresses, limits: by the settings' names."""
        self._ports = {split_address(address)[1]: setting for setting, address in addresses.items()}
        self._limits, self._metrics = limits, metrics
        self._full_at: dict[str, float] = {}
        """When a full port was last logged."""
        self._handshakes = {setting: _Handshakes(setting, metrics) for setting in CERTIFICATE_PORTS}
        for setting in self._ports.values():
            metrics.connections_limit.labels(setting).set(limits[setting])

    async def watch(self) -> None:
        """Check periodically, without end."""
        while True:
            self.check(await asyncio.to_thread(connections_to, self._ports), time.monotonic())
            await asyncio.sleep(CHECK_S)

    def check(self, connections: Mapping[int, Counter[str]], now: float) -> None:
        """Update the metrics, and log what needs attention."""
        for port, holders in connections.items():
            setting = self._ports[port]
            self._metrics.connections.labels(setting).set(holders.total())
            self._check_full(setting, holders, now)
            if (handshakes := self._handshakes.get(setting)) is not None:
                handshakes.check(holders, now)

    def _check_full(self, setting: str, holders: Counter[str], now: float) -> None:
        limit = self._limits[setting]
        if holders.total() < limit or now - self._full_at.get(setting, float("-inf")) < LOG_S:
            return
        self._full_at[setting] = now
        log.warning(
            "connections_full", port=setting, connections=holders.total(), limit=limit, connected=_most(holders),
            todo="check where they come from; further connections are closed at once",
        )  # fmt: skip


class _Handshakes:
    """Counts and logs the failed TLS handshakes of one port."""

    def __init__(self, setting: str, metrics: Metrics) -> None:
        self._setting, self._metrics = setting, metrics
        self._began: deque[tuple[float, float]] = deque()
        """Times of checks, and how many handshakes had begun: those since SETTLED_S, and one before."""
        self._failed = self._reported = 0.0
        self._logged_at = float("-inf")

    def check(self, holders: Counter[str], now: float) -> None:
        """Count what has failed, and log it once in a while."""
        self._began.append((now, self._value("fl_tls_handshakes_total")))
        while len(self._began) > 1 and self._began[1][0] <= now - SETTLED_S:
            self._began.popleft()
        at, settled = self._began[0]
        if at > now - SETTLED_S:
            return
        # Never above the truth: `used` also has connections whose handshakes are not settled.
        failed = settled - self._value("fl_connections_used_total")
        if failed > self._failed:
            self._metrics.handshakes_failed.labels(self._setting).inc(failed - self._failed)
            self._failed = failed
        self._log(holders, now)

    def _log(self, holders: Counter[str], now: float) -> None:
        fresh = self._failed - self._reported
        if not fresh or now - self._logged_at < (LOG_S if fresh >= MANY_FAILED else FEW_LOG_S):
            return
        self._reported, self._logged_at = self._failed, now
        log.warning(
            "handshakes_failed", port=self._setting, handshakes=int(fresh), connected=_most(holders),
            todo="a caller's certificate has expired or is of another authority, or it does not use TLS: "
            "`fl-client doctor` on the device names the cause",
        )  # fmt: skip

    def _value(self, name: str) -> float:
        """One value. All metrics together take tens of milliseconds, for they count tasks and open files."""
        families = self._metrics.registry.restricted_registry([name]).collect()
        samples = (sample for family in families for sample in family.samples)
        labels = {"port": self._setting}
        return next((sample.value for sample in samples if (sample.name, sample.labels) == (name, labels)), 0.0)


def _most(holders: Counter[str]) -> dict[str, int]:
    """The addresses with the most connections."""
    return dict(holders.most_common(MOST_SHOWN))
