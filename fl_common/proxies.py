"""The HTTP proxy of the environment that a connection goes through, for gRPC and for plain sockets.

The variables are those that gRPC reads. A loopback address never has a proxy, and `no_proxy` may have "*": gRPC sends
both through the proxy otherwise.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import time
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from fl_common.settings import is_loopback, split_address

_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
"""The first one that is set counts, as in gRPC."""
_PORT = 80
_MOST_BYTES = 16 << 10
"""Largest answer of a proxy."""
_FAILURES = (
    ("Connection refused", "the proxy does not answer: nothing listens there"),
    (r"HTTP proxy returned response code (\d+)", r"the proxy refuses the connection with status \1"),
    ("Expected status code", "the proxy does not answer as an HTTP proxy"),
)
"""gRPC's texts for failures of the proxy itself, measured with the version in constraints.txt."""


class ProxyRefused(OSError):
    """The proxy answered, and did not connect."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, and the variable that names it."""

    variable: str
    address: str
    """host:port"""
    user: str = field(default="", repr=False)
    """user:password of the URL; never part of a text."""

    @property
    def url(self) -> str:
        """The URL with the password, for gRPC only."""
        return f"http://{self.user}{'@' if self.user else ''}{self.address}"

    def __str__(self) -> str:
        return f"the proxy http://{self.address} of the variable {self.variable}"

    def explained(self, explanation: str, message: str, setting: str) -> str:
        """Why a connection failed: at this proxy, or behind it.

        explanation: for a failure behind the proxy. message: gRPC's. setting: what turns proxies off.
        """
        for pattern, words in _FAILURES:
            if match := re.search(pattern, message):
                explanation = f"{match.expand(words)} ({message})"
        return (
            f"{explanation}; the connection goes through {self}: if it needs no proxy, set {setting}, or add the host "
            "to no_proxy"
        )


def proxy_for(address: str, use: bool = True, environ: Mapping[str, str] = os.environ) -> Proxy | None:
    """The proxy of a connection to host:port; None for a direct one. use: False for the setting `use_proxy = false`."""
    host = split_address(address)[0]
    if not use or is_loopback(host) or _excepted(host, environ):
        return None
    variable = next((name for name in _VARIABLES if environ.get(name)), None)
    if variable is None:
        return None
    text = environ[variable]
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme != "http" or not parts.hostname:
        return None  # gRPC cannot use it either
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    try:
        return Proxy(variable, f"{name}:{parts.port or _PORT}", parts.netloc.rpartition("@")[0])
    except ValueError:  # of the port
        return None


def channel_options(proxy: Proxy | None) -> dict[str, str | int]:
    """gRPC's options of a channel through this proxy, or through none whatever the environment has."""
    return (
        {"grpc.enable_http_proxy": 0} if proxy is None else {"grpc.enable_http_proxy": 1, "grpc.http_proxy": proxy.url}
    )


def connect(address: str, proxy: Proxy | None, seconds: float) -> socket.socket:
    """A TCP connection to host:port, which the caller closes. Raises OSError."""
    if proxy is None:
        return socket.create_connection(split_address(address), timeout=seconds)
    connection = socket.create_connection(split_address(proxy.address), timeout=seconds)
    try:
        _tunnel(connection, address, proxy, time.monotonic() + seconds)
    except BaseException:
        connection.close()
        raise
    return connection


def _tunnel(connection: socket.socket, address: str, proxy: Proxy, ends: float) -> None:
    key = b64encode(unquote(proxy.user).encode()).decode()
    login = f"Proxy-Authorization: Basic {key}\r\n" if proxy.user else ""
    connection.sendall(f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n{login}\r\n".encode())
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):  # byte by byte, because what follows belongs to the tunnel
        byte = connection.recv(1)
        answer += byte
        if not byte or len(answer) > _MOST_BYTES or time.monotonic() > ends:
            break
    status = re.match(rb"HTTP/1\.\d (\d{3})", answer)
    if status is None:
        raise ProxyRefused(f"{proxy} does not answer as an HTTP proxy")
    if not status[1].startswith(b"2"):
        raise ProxyRefused(f"{proxy} refuses the connection with status {status[1].decode()}")


def _excepted(host: str, environ: Mapping[str, str]) -> bool:
    variable = next((name for name in _EXCEPTIONS if environ.get(name)), "no_proxy")
    entries = (entry.strip().lower() for entry in environ.get(variable, "").split(","))
    return any(_matches(host.lower(), entry) for entry in entries if entry)


def _matches(host: str, entry: str) -> bool:
    """entry: "*", a host, a domain with or without a dot in front, or a network such as 10.0.0.0/8."""
    if entry == "*":
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        domain = entry.removeprefix("*").removeprefix(".")
        return host == domain or host.endswith(f".{domain}")
