"""Runs the web process of a coordinator: its socket, its channel to the coordinator, and its end."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio

from fl_web.access.identities import Coordinator, Everybody
from fl_web.coordinator.reader import Reader
from fl_web.guarded import guarded_app
from fl_web.serve import Tls, renew, server
from protos.wire import client_options

log = logging.getLogger("fl_web")

_HOW = "An operator gets a login link with `fl web open`."
_RECONNECT_MS = 1000


def run(line: bytes, until_closed: Callable[[threading.Event], None]) -> int:
    """Serve with these settings. until_closed: sets its event when the process is to end, in a thread of its own."""
    asyncio.run(_serve(json.loads(line), until_closed))
    return 0


async def _serve(settings: dict[str, Any], until_closed: Callable[[threading.Event], None]) -> None:
    options = {**dict(client_options()), "grpc.max_reconnect_backoff_ms": _RECONNECT_MS}
    tls = None if settings["tls"] is None else _tls(settings["tls"])
    listening = socket.socket(fileno=settings["listening"])
    async with grpc.aio.insecure_channel(f"unix:{settings['socket']}", tuple(options.items())) as channel:
        identities = Coordinator(channel) if settings["has_login"] else Everybody(Reader(channel))
        app = guarded_app(identities, _HOW, hosts=settings["hosts"], secure=tls is not None)
        serving = server(app, tls)
        loop = asyncio.get_running_loop()
        end = _End(lambda: loop.call_soon_threadsafe(setattr, serving, "should_exit", True))
        threading.Thread(target=until_closed, args=(end,), daemon=True).start()
        context = serving.config.ssl
        renewing = None if tls is None or context is None else asyncio.create_task(renew(context, tls, log.warning))
        try:
            await serving.serve(sockets=[listening])
        finally:
            if renewing is not None:
                renewing.cancel()
            await identities.close()


class _End(threading.Event):
    """Calls a function when it is set."""

    def __init__(self, then: Callable[[], object]) -> None:
        super().__init__()
        self._then = then

    def set(self) -> None:
        """The process is to end."""
        super().set()
        self._then()


def _tls(files: dict[str, Any]) -> Tls:
    authority = files["client_ca"]
    return Tls(
        Path(files["cert"]), Path(files["key"]), None if authority is None else Path(authority), files["min_version"]
    )
