"""Who holds connections to the coordinator's ports, as the kernel knows it: also those that never made a call.

grpc says nothing of a handshake that failed, nor of a connection that it closed for a limit. What can be had: the
kernel's table of TCP connections, and how many handshakes began and how many connections made a first call.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import structlog

from fl_server.metrics import Metrics
from protos.settings import split_address

log = structlog.get_logger()

LOOK_S = 5.0
TELL_S = 60.0
"""Between two lines about a port: what goes on does not fill the log."""
SHOWN = 3
"""Addresses in a line, those with the most connections."""
_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"
MANY_UNUSED = 20
"""Handshakes within TELL_S that came to no call, from which on there is a line."""


def connections_to(ports: Iterable[int], tables: Iterable[Path] = _TABLES) -> dict[int, Counter[str]]:
    """By local port: the other ends' addresses, with how many connections each has. Blocking; empty without Linux."""
    found: dict[int, Counter[str]] = {port: Counter() for port in ports}
    for table in tables:
        try:
            lines = table.read_text().splitlines()[1:]
        except OSError:
            continue  # not Linux; no IPv6; or no file may be opened now, and there are better places to say so
        for line in lines:
            _, local, remote, state, *_ = line.split()
            port = int(local.rpartition(":")[2], 16)
            if state == _ESTABLISHED and port in found:
                found[port][_address(remote.rpartition(":")[0])] += 1
    return found


def _address(digits: str) -> str:
    """As the kernel prints it: words of four bytes in the machine's order, which is little-endian where we run."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


class ConnectionWatch:
    """Counts connections for Prometheus, and says when a port has no more of them."""

    def __init__(self, addresses: Mapping[str, str], limits: Mapping[str, int], metrics: Metrics) -> None:
        """addresses, limits: by the settings' names."""
        self._ports = {split_address(address)[1]: setting for setting, address in addresses.items()}
        self._limits, self._metrics = limits, metrics
        self._told: dict[str, float] = {}
        self._before: dict[str, tuple[float, float]] = {}
        """When handshakes without calls were last taken down, and how many there were."""
        for setting in self._ports.values():
            metrics.connections_limit.labels(setting).set(limits[setting])

    async def watch(self) -> None:
        """Look for ever."""
        while True:
            self.look(await asyncio.to_thread(connections_to, self._ports), time.monotonic())
            await asyncio.sleep(LOOK_S)

    def look(self, found: Mapping[int, Counter[str]], now: float) -> None:
        """Tell of what was found."""
        for port, holders in found.items():
            setting = self._ports[port]
            self._metrics.connections.labels(setting).set(holders.total())
            if now - self._told.get(setting, float("-inf")) >= TELL_S and self._tell(setting, holders, now):
                self._told[setting] = now

    def _tell(self, setting: str, holders: Counter[str], now: float) -> bool:
        """Whether there was something to say."""
        most, limit = dict(holders.most_common(SHOWN)), self._limits[setting]
        unused = self._handshakes_without_calls(setting)
        since, before = self._before.setdefault(setting, (now, unused))
        if unused - before >= MANY_UNUSED or now - since >= TELL_S:
            self._before[setting] = now, unused
        if holders.total() >= limit:
            todo = "see who they are; further ones are closed at once"
            log.warning(
                "connections_full", port=setting, connections=holders.total(), limit=limit, connected=most, todo=todo
            )
            return True
        if unused - before >= MANY_UNUSED:
            todo = "a certificate of another CA, an expired one, or a stranger"
            log.warning(
                "handshakes_without_calls", port=setting, handshakes=int(unused - before), connected=most, todo=todo
            )
            return True
        return False

    def _handshakes_without_calls(self, setting: str) -> float:
        value = self._metrics.registry.get_sample_value
        labels = {"port": setting}
        began = value("fl_tls_handshakes_total", labels) or 0.0
        return began - (value("fl_connections_used_total", labels) or 0.0) if began else 0.0
