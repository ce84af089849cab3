"""The way to the coordinator below TLS: its name, and its port."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator

from fl_client.config import ClientConfig
from fl_client.setup.findings import Finding, fail, ok
from protos.settings import split_address

SECONDS = 5.0
"""Patience with one connection."""


def look_up(config: ClientConfig) -> Iterator[Finding]:
    """The addresses of the coordinator's name."""
    host, port = split_address(config.server)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        mend = (
            "no name server answered: is the network up? resolvectl status"
            if error.errno == socket.EAI_AGAIN
            else f"is server in the settings right, and known to the name server? getent hosts {host}"
        )
        yield fail("name", f"expected an address for {host}, got: {error.strerror}", mend)
        return
    yield ok("name", f"{host} is {', '.join(dict.fromkeys(str(entry[4][0]) for entry in found))}")


def connect(config: ClientConfig) -> Iterator[Finding]:
    """A TCP connection, and how long it took."""
    began = time.monotonic()
    try:
        opened(config).close()
    except OSError as error:
        yield fail("port", f"expected a connection to {config.server}, got: {error}", _mend(error))
        return
    yield ok("port", f"{config.server} is open, in {1000 * (time.monotonic() - began):.0f} ms")


def opened(config: ClientConfig) -> socket.socket:
    """A connection; close it. Raises OSError."""
    return socket.create_connection(split_address(config.server), timeout=SECONDS)


def _mend(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there: is the coordinator running, and is this the port of its `listen`?"
    if isinstance(error, TimeoutError):
        return "nothing answers: a firewall on the way or at the coordinator? its port for clients must be open"
    if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return "there is no way to it: is the network up, and is there a route? ip route get ADDRESS"
    return "look at the network: ip route, ping"
