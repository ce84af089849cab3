"""Checks of the coordinator's name and port, and of the device's clock, without which no certificate is valid."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from fl_client.settings.config import ClientConfig
from fl_client.setup.doctor.certificates import read
from fl_client.setup.doctor.findings import Finding, fail, ok
from fl_common import proxies
from fl_common.proxies import proxy_for
from fl_common.settings import split_address

SECONDS = 5.0
"""Timeout of one connection."""


def look_up(config: ClientConfig) -> Iterator[Finding]:
    """Resolve the coordinator's name, or the proxy's, which then resolves the coordinator's."""
    proxy = proxy_for(config.server, config.use_proxy)
    host, port = split_address(config.server if proxy is None else proxy.address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        fix = (
            "no name server answered: is the network up? resolvectl status"
            if error.errno == socket.EAI_AGAIN
            else f"check server in the settings, and the name server: getent hosts {host}"
        )
        fix = fix if proxy is None else f"check the variable {proxy.variable}; {_NO_PROXY}"
        yield fail("name", f"expected an address for {host}, got: {error.strerror}", fix)
        return
    yield ok("name", f"{host} is {', '.join(dict.fromkeys(str(entry[4][0]) for entry in found))}")


def connect(config: ClientConfig) -> Iterator[Finding]:
    """Open a TCP connection, and measure its time."""
    proxy, began = proxy_for(config.server, config.use_proxy), time.monotonic()
    through = "" if proxy is None else f" through {proxy}"
    try:
        open_connection(config).close()
    except OSError as error:
        fix = _fix(error) if proxy is None else f"is {proxy} needed, and does it allow this port? {_NO_PROXY}"
        yield fail("port", f"expected a connection to {config.server}{through}, got: {error}", fix)
        return
    yield ok("port", f"{config.server} is open{through}, connected in {1000 * (time.monotonic() - began):.0f} ms")


def open_connection(config: ClientConfig) -> socket.socket:
    """A connection, through the proxy if there is one, which the caller closes. Raises OSError."""
    return proxies.connect(config.server, proxy_for(config.server, config.use_proxy), SECONDS)


def _fix(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "the port is closed: is the coordinator running, and is this the port of its `listen`?"
    if isinstance(error, TimeoutError):
        return "no answer: is there a firewall? the coordinator's port for clients must be open"
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return "there is no route: is the network up? ip route get ADDRESS"
    return "check the network: ip route, ping"


_NO_PROXY = "use_proxy = false in the settings, or the host in no_proxy, connects without it"


def check_clock(config: ClientConfig) -> Finding:
    """Compare the clock with the dates of this program's files, the device's certificate, and its CA's."""
    earliest = {"this program was installed": datetime.fromtimestamp(Path(__file__).stat().st_mtime, UTC)}
    if config.tls is not None:
        for path in (config.tls.ca, config.tls.cert):
            if certificate := read(path):
                earliest[f"{path} was made"] = certificate.not_valid_before_utc
    now = datetime.now(UTC)
    what, when = max(earliest.items(), key=lambda item: item[1])
    if now < when:
        return fail(
            "clock",
            f"expected a time after {when:%Y-%m-%d %H:%M} UTC, when {what}, got {now:%Y-%m-%d %H:%M} UTC",
            "set the clock: sudo timedatectl set-ntp true, and check with timedatectl that it is synchronized",
        )
    return ok("clock", f"{now:%Y-%m-%d %H:%M} UTC, plausible")
