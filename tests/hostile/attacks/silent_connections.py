"""Opens silent TCP connections to every port, up to any limit of open files."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from tests.hostile.target import Target

CONNECTIONS = 300
"""Number of open connections over all ports; closed ones are reopened."""
PAUSE_S = 0.05


def attack(target: Target, until: Callable[[], bool]) -> None:
    """Keep this many connections open."""
    addresses = (target.listen, target.health_listen, target.metrics_listen, target.listen)
    held: list[socket.socket] = []
    try:
        while not until():
            held = [each for each in held if _is_open(each)]
            while len(held) < CONNECTIONS:
                if (opened := _connect(addresses[len(held) % len(addresses)])) is None:
                    break
                held.append(opened)
            time.sleep(PAUSE_S)
    finally:
        for each in held:
            each.close()


def _connect(address: str) -> socket.socket | None:
    host, _, port = address.rpartition(":")
    try:
        opened = socket.create_connection((host, int(port)), timeout=0.5)
    except OSError:
        return None
    opened.setblocking(False)
    return opened


def _is_open(held: socket.socket) -> bool:
    try:
        if held.recv(1 << 16):
            return True
    except BlockingIOError:
        return True
    except OSError:
        pass
    held.close()
    return False
