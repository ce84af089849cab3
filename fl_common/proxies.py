"""The HTTP proxy that a connection goes through, for gRPC and for plain sockets.

A setting chooses: "none", "environment" or the proxy's URL. The variables of the environment are those that gRPC reads.
A loopback address, or a name that the hosts file gives one, never has a proxy, and `no_proxy` may have "*": gRPC sends
all of them through the proxy otherwise.
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
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote, urlsplit

from pydantic import AfterValidator

from fl_common.settings import is_loopback, split_address

NONE, ENVIRONMENT = "none", "environment"
"""The settings beside a URL."""
HOSTS = Path("/etc/hosts")
_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
"""The first one that is set counts, as in gRPC."""
_PORT = 80
_MOST_BYTES = 16 << 10
"""Largest answer of a proxy."""
_FAILURES = (
    ("Connection refused", "the proxy does not answer: nothing listens there"),
    (
        "HTTP proxy returned response code 407",
        "the proxy asks for a login (status 407): its URL is http://USER:PASSWORD@HOST:PORT, with %40 for an @ in them",
    ),
    (r"HTTP proxy returned response code (\d+)", r"the proxy refuses the connection with status \1"),
    ("Expected status code", "the proxy does not answer as an HTTP proxy"),
)
"""gRPC's texts for failures of the proxy itself, measured with the version in constraints.txt."""


class ProxyRefused(OSError):
    """The proxy answered, and did not connect."""


def checked_proxy(text: str) -> str:
    """A value of the setting. Raises ValueError."""
    if text not in {NONE, ENVIRONMENT} and ("://" not in text or _parsed(text, "") is None):
        # Without the value: it may have a password.
        raise ValueError(f'expected "{NONE}", "{ENVIRONMENT}" or the URL http://HOST:PORT of a proxy, got another text')
    return text


ProxySetting = Annotated[str, AfterValidator(checked_proxy)]
"""Which proxy a connection has: "none", "environment" or a URL http://HOST:PORT."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, and what names it."""

    source: str
    """"the variable http_proxy", or "the setting proxy"."""
    address: str
    """host:port"""
    user: str = field(default="", repr=False)
    """user:password of the URL; never part of a text."""

    @property
    def url(self) -> str:
        """The URL with the password, for gRPC only."""
        return f"http://{self.user}{'@' if self.user else ''}{self.address}"

    def __str__(self) -> str:
        return f"the proxy http://{self.address} of {self.source}"

    def explained(self, explanation: str, message: str, setting: str) -> str:
        """Why a connection failed: at this proxy, or behind it.

        explanation: for a failure behind the proxy. message: gRPC's. setting: what turns the proxy off.
        """
        for pattern, words in _FAILURES:
            if match := re.search(pattern, message):
                explanation = f"{match.expand(words)} ({message})"
                break
        return f"{explanation}; the connection goes through {self}: if it needs no proxy, {self.without(setting)}"

    def without(self, setting: str) -> str:
        """What makes the connection direct. setting: that turns the proxy off."""
        return f"set {setting}{', or add the host to no_proxy' if self.source.startswith('the variable') else ''}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The proxy of a connection; None for a direct one. why: the reason, for people."""

    proxy: Proxy | None
    why: str
    unusable: bool = False
    """A variable names a proxy that gRPC cannot use."""


def proxy_for(address: str, setting: str = ENVIRONMENT, environ: Mapping[str, str] = os.environ) -> Proxy | None:
    """The proxy of a connection to host:port; None for a direct one. setting: a `ProxySetting`."""
    return choice_for(address, setting, environ).proxy


def choice_for(address: str, setting: str = ENVIRONMENT, environ: Mapping[str, str] = os.environ) -> Choice:
    """The proxy of a connection to host:port, with the reason. The arguments are those of `proxy_for`."""
    host = split_address(address)[0]
    if is_this_machine(host):
        return Choice(None, f"{host} is this machine, which is never behind a proxy")
    if setting == NONE:
        return Choice(None, f'the setting proxy is "{NONE}"')
    if setting != ENVIRONMENT:
        proxy = _parsed(setting, "the setting proxy")
        return Choice(proxy, str(proxy))
    return _of_environment(host, environ)


def _of_environment(host: str, environ: Mapping[str, str]) -> Choice:
    variable = next((name for name in _VARIABLES if environ.get(name)), None)
    if variable is None:
        return Choice(None, f"none of the variables {', '.join(_VARIABLES)} is set")
    if exception := _exception(host, environ):
        return Choice(None, f"the variable {exception} has {host}")
    if (proxy := _parsed(environ[variable], f"the variable {variable}")) is None:
        return Choice(None, f"the variable {variable} is not used: it is no URL http://HOST:PORT", unusable=True)
    return Choice(proxy, str(proxy))


def _parsed(text: str, source: str) -> Proxy | None:
    """The proxy of a URL; None if gRPC cannot use it."""
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port or _PORT
    except ValueError:
        return None
    if parts.scheme != "http" or not parts.hostname:
        return None
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Proxy(source, f"{name}:{port}", parts.netloc.rpartition("@")[0])


def is_this_machine(host: str) -> bool:
    """Whether the host is a loopback address, or a name that the hosts file gives one. No name server is asked."""
    if is_loopback(host):
        return True
    try:
        lines = HOSTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    entries = (line.partition("#")[0].lower().split() for line in lines)
    return any(is_loopback(entry[0]) for entry in entries if host.lower() in entry[1:])


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
    if status[1] == b"407":
        raise ProxyRefused(f"{proxy} asks for a login (status 407): its URL is http://USER:PASSWORD@HOST:PORT")
    if not status[1].startswith(b"2"):
        raise ProxyRefused(f"{proxy} refuses the connection with status {status[1].decode()}")


def _exception(host: str, environ: Mapping[str, str]) -> str:
    """The variable that excepts the host; empty if none does."""
    variable = next((name for name in _EXCEPTIONS if environ.get(name)), "no_proxy")
    entries = (entry.strip().lower() for entry in environ.get(variable, "").split(","))
    return variable if any(_matches(host.lower(), entry) for entry in entries if entry) else ""


def _matches(host: str, entry: str) -> bool:
    """entry: "*", a host, a domain with or without a dot in front, or a network such as 10.0.0.0/8."""
    if entry == "*":
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        domain = entry.removeprefix("*").removeprefix(".")
        return host == domain or host.endswith(f".{domain}")
