"""What limits count as one caller: an address of IPv4, or a network of IPv6."""

from __future__ import annotations

import ipaddress

_NETWORK_BITS = 64
"""One holder usually has a /64 network of IPv6."""


def network_of(address: str) -> str:
    """What the limits of a caller's address (host:port) count: the address of IPv4, the /64 network of IPv6."""
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, _NETWORK_BITS), strict=False))
