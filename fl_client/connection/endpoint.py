"""The coordinator's address, how to connect to it, and when another connection or session is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fl_client.connection.transport import Connect
from fl_client.errors import TransportError
from protos.fl.v1 import coordinator_pb2 as pb

WaitForRenewal = Callable[[], Awaitable[None]]
"""Waits until a new connection is needed although the current one works. Raises PolicyChanged for a new session."""


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


def _any(response: pb.RegisterResponse) -> None:
    """Accept every coordinator."""


def _unchanged(error: TransportError) -> TransportError:
    return error


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The coordinator's address, and how to connect to it."""

    server: str
    connect: Connect
    renewed: WaitForRenewal = _never
    explained: Callable[[TransportError], TransportError] = _unchanged
    """The error of a connection without an answer, or the cause of it that this device knows."""
    accept: Callable[[pb.RegisterResponse], None] = _any
    """Raises Untrusted for a coordinator that this device must not work for."""
