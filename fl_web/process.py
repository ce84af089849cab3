"""Runs the web process of a coordinator: its socket, its channel to the coordinator, renewed certificates, its end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc.aio
import uvicorn

from fl_web.access.identities import Coordinator, Everybody
from fl_web.app import guarded_app
from fl_web.coordinator.reader import Reader
from fl_web.serve import Listener, Tls, server
from protos.wire import client_options

log = logging.getLogger("fl_web")

_HOW = "An operator gets a login link with `fl web open`."
_RECONNECT_MS = 1000
_END_S = 3.0
"""The process ends at once after this long without an end."""


def run(line: bytes, lines: Iterator[bytes]) -> int:
    """Serve with these settings.

    lines: further settings, of which only those of TLS are used. The process ends with them; they are read in a thread.
    """
    asyncio.run(_serve(json.loads(line), lines))
    return 0


async def _serve(settings: dict[str, Any], lines: Iterator[bytes]) -> None:
    options = {**dict(client_options()), "grpc.max_reconnect_backoff_ms": _RECONNECT_MS}
    tls = None if settings["tls"] is None else Tls(**settings["tls"])
    listener = Listener(socket.socket(fileno=settings["listening"]))
    async with grpc.aio.insecure_channel(f"unix:{settings['socket']}", tuple(options.items())) as channel:
        has_login, key = settings["has_login"], bytes.fromhex(settings["secrets_key"])
        identities = Coordinator(channel, key) if has_login else Everybody(Reader(channel))
        app = guarded_app(identities, _HOW, hosts=settings["hosts"], secure=tls is not None)
        serving = server(app, listener, tls)
        following = threading.Thread(
            target=_follow, args=(lines, asyncio.get_running_loop(), serving), daemon=True, name="settings"
        )
        following.start()
        try:
            await serving.serve(sockets=[listener])
        finally:
            await identities.close()


def _follow(lines: Iterator[bytes], loop: asyncio.AbstractEventLoop, serving: uvicorn.Server) -> None:
    """Use renewed certificates until the settings end; then end the process."""
    for line in lines:
        loop.call_soon_threadsafe(_renew, serving, Tls(**json.loads(line)["tls"]))
    with suppress(RuntimeError):  # the loop is closed: the process ends already
        loop.call_soon_threadsafe(setattr, serving, "should_exit", True)
    time.sleep(_END_S)
    os._exit(0)


def _renew(serving: uvicorn.Server, tls: Tls) -> None:
    """Use a renewed certificate. Open connections keep the earlier one."""
    try:
        if serving.config.ssl is not None:
            tls.load(serving.config.ssl)
    except ssl.SSLError as error:
        log.warning("the renewed certificate cannot be used: %s", error)
