"""The grpc servers of a coordinator: one for each port, with its TLS credentials, the checks of its calls, and a watch.

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
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import cast

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from fl_common.certificates.pem import Pem, PemChange, PemFiles, PemWatcher
from fl_common.certificates.tls_version import check_oldest_tls
from fl_common.settings import split_address
from fl_server.metrics import CERTIFICATE_PORTS, Metrics
from fl_server.rpc.call_limits import CallLimits
from fl_server.rpc.health import Health
from fl_server.rpc.interceptors import CallInterceptor, CallPolicy, Tokens
from fl_server.rpc.methods import METHODS, WEB_METHODS
from fl_server.rpc.ports import WEB_CALLS, Port, server_of, web_options
from fl_server.services import Services
from fl_server.settings.sections import TlsConfig
from fl_server.web.page import WebSessions

log = structlog.get_logger()
WATCH_S = 5.0
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
CHECK_S = 2.0
"""Period of the checks of the files. New content is used after the second check that finds it."""


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
            await asyncio.sleep(WATCH_S)

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


class Certificates:
    """The coordinator's certificate and the CA of its callers. A renewal does not affect open connections."""

    def __init__(self, tls: TlsConfig, metrics: Metrics) -> None:
        """Read the files. Raises SettingsError if they cannot be used."""
        check_oldest_tls(tls.min_version)
        self.files = PemWatcher(PemFiles(tls.cert, tls.key, tls.client_ca, "client_ca"))
        self._metrics = metrics
        self._warned: Pem | None = None
        self._report_expiry()

    def credentials(
        self,
        began: Callable[[], None] = lambda: None,
        presented: Callable[[], Pem] | None = None,
        *,
        asks_callers: bool = True,
    ) -> grpc.ServerCredentials:
        """Credentials of one port. Client certificates are required if a CA for them is set.

        began: called at each handshake, in a thread of its own. presented: what the port uses in place of the files;
        it returns the same object as long as nothing has changed. asks_callers: False for a port whose callers have no
        certificates.
        """
        current = presented or (lambda: self.files.pem)
        used = [current()]

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """grpc calls this before each handshake, in a thread of its own; None: no change."""
            began()
            if (pem := current()) is used[0]:
                return None
            used[0] = pem
            return _configuration(pem)

        needed = asks_callers and used[0].ca is not None
        # grpc documents None; its type stubs do not have it.
        asked = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewed)
        return grpc.dynamic_ssl_server_credentials(_configuration(used[0]), asked, needed)

    async def checks(self) -> AsyncIterator[None]:
        """Check the files periodically, without end. Yields after each check."""
        while True:
            await asyncio.sleep(CHECK_S)
            match await asyncio.to_thread(self.files.poll):
                case PemChange.RENEWED:
                    log.info("certificates_renewed", serial=f"{self.files.pem.leaf.serial_number:x}")
                case PemChange.UNUSABLE:
                    log.warning("certificates_not_used", reason=self.files.problem, todo="the earlier ones stay in use")
            self._report_expiry()
            yield

    def _report_expiry(self) -> None:
        pem = self.files.pem
        if pem is self._warned:
            return
        self._metrics.certificates.show(pem.periods())
        if pem.ending(datetime.now(UTC)):
            self._warned = pem
            log.warning("certificate_ends_soon", not_after=pem.leaf.not_valid_after_utc.isoformat())


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.ca)


@dataclass(frozen=True, slots=True)
class Callers:
    """Who calls a port whose callers have no certificates."""

    presented: Callable[[], Pem] | None = None
    """What the port shows in place of the coordinator's own files."""
    tokens: Tokens | None = None
    """Verifies what operators send; None: callers have no identity."""


class Listeners:
    """Opens the ports, and stops them together."""

    def __init__(self, services: Services, ports: dict[str, Port], certificates: Certificates | None) -> None:
        self._services, self._ports, self._certificates = services, ports, certificates
        self._servers: list[grpc.aio.Server] = []
        self.addresses = services.addresses
        """host:port, by the setting's name."""

    def open(self, address: str, setting: str, callers: Callers | None = None) -> grpc.aio.Server:
        """A server that listens, not started yet. callers: None where they have the certificates of the settings.

        Raises SettingsError for an address that cannot be used.
        """
        port, metrics = self._ports[setting], self._services.metrics
        checks = CallInterceptor(self._policy(setting, callers))
        self._services.revocations.on_change.append(checks.end_denied)
        credentials = None
        if self._certificates is not None:
            credentials = partial(
                self._certificates.credentials,
                metrics.handshakes.labels(setting).inc,
                None if callers is None else callers.presented,
                asks_callers=callers is None,
            )
        server = server_of(port, [*self._services.traces.server_interceptors(), checks], credentials)
        self.addresses[setting] = server.listen(address, setting)
        self._servers.append(server)
        return server

    def _policy(self, setting: str, callers: Callers | None) -> CallPolicy:
        services, port, tls = self._services, self._ports[setting], self._services.config.tls
        return CallPolicy(
            services.metrics,
            CallLimits(port.streams, port.calls, known_connections=2 * port.connections),
            setting,
            services.fleet.records,
            services.revocations,
            services.config.limits.stall_s,
            services.audit,
            trusts_everybody=callers is None and (tls is None or tls.no_client_certificates),
            tokens=None if callers is None else callers.tokens,
        )

    def for_web(self, sessions: WebSessions) -> grpc.aio.Server:
        """A server for the web process's socket, which does not listen yet. It knows browsers by their sessions."""
        services = self._services
        has_login = services.config.operators_have_names
        policy = CallPolicy(
            services.metrics,
            CallLimits(WEB_CALLS, WEB_CALLS),
            "web_listen",
            revocations=services.revocations,
            stall_s=services.config.limits.stall_s,
            audit=services.audit,
            trusts_everybody=not has_login,
            tokens=sessions if has_login else None,
            names_addresses=True,
            methods={name: METHODS[name] for name in WEB_METHODS},
        )
        checks = CallInterceptor(policy)
        services.revocations.on_change += [sessions.drop_denied, checks.end_denied]
        return grpc.aio.server(interceptors=[checks], options=web_options())

    async def start(self, server: grpc.aio.Server, service: str, probes: Health) -> None:
        """Start a server with its health, and with reflection if the settings ask for it."""
        probes.serve_on(server)
        if self._services.config.reflection:
            reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        await server.start()

    async def stop(self, grace_s: float) -> None:
        """Stop all servers at once."""
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
