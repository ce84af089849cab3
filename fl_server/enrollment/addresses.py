"""The coordinator's ports as devices dial them, for the commands that `fl enroll create` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fl_common.settings import is_loopback, split_address
from fl_server.settings.config import ServerConfig


def dialed(config: ServerConfig, bound: Mapping[str, str], names: Sequence[str]) -> tuple[str, str]:
    """The addresses host:port for clients and for enrollment.

    The settings' own come first. Otherwise the port is the one that is open, and the host is one that the certificate
    has, so that a device's check of it succeeds. The host is empty if nothing names it.

    Args:
        config: the settings.
        bound: the open ports, host:port, by the setting's name.
        names: the hosts of the coordinator's certificate.
    """
    given = {"listen": config.client_address, "enroll_listen": config.enroll_address}
    hosts = [split_address(address)[0] for address in given.values() if address]
    hosts += [name for name in names if not is_loopback(name) and not name.startswith("*")]
    client, enrollment = (
        address or _address(bound.get(port) or str(getattr(config, port)), hosts, names)
        for port, address in given.items()
    )
    return client, enrollment


def _address(bound: str, hosts: Sequence[str], names: Sequence[str]) -> str:
    host, port = split_address(bound)
    if host not in names and not is_loopback(host):
        host = hosts[0] if hosts else ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
