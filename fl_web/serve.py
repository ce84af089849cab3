"""Serves the web application over HTTP until it is ended."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn

from fl_web.coordinator.reader import Reader

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Message, Receive, Send], Awaitable[None]]

_STOP_S = 1
"""Open event streams are ended this long after a signal."""


def with_reader(app: Application, reader: Reader) -> Application:
    """The application with one identity for all its requests."""

    async def application(scope: Message, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["reader"] = reader
        await app(scope, receive, send)

    return application


async def serve(app: Application, listening: socket.socket) -> None:
    """Answer requests on a socket that listens, until a signal to end."""
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", server_header=False, timeout_graceful_shutdown=_STOP_S
    )
    await uvicorn.Server(config).serve(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    return listening
