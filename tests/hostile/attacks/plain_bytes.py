"""Connections that begin with bytes of no protocol, on every port, and are kept open."""

from __future__ import annotations

import socket
import time

from fl_common.settings import split_address
from tests.hostile.target import Target, Until

AT_ONCE = 20
"""Connections to each port."""


def attack(target: Target, until: Until) -> None:
    """Open them, send random bytes, keep them for a while, and start again."""
    ports = (target.listen, target.admin_listen, target.metrics_listen, target.health_listen)
    while not until():
        held = [_opened(address) for address in ports for _ in range(AT_ONCE)]
        time.sleep(0.2)
        for each in held:
            if each is not None:
                each.close()


def _opened(address: str) -> socket.socket | None:
    try:
        connection = socket.create_connection(split_address(address), timeout=1.0)
        connection.sendall(b"\x00\xff rubbish \r\n" * 100)
    except OSError:
        return None
    return connection
