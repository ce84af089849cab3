"""Answers browsers with status 503 while the process that serves the web page cannot start.

The coordinator runs this file as a process of its own, with the same line of settings on its standard input; it ends
when that is closed. It needs the standard library alone, since the environment may be broken, and reads nothing of a
request but where its headers end.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
from contextlib import suppress
from typing import Any

_REQUEST_S = 5.0
"""A connection without a whole request after this time is closed."""
_END_S = 0.5
"""Connections that were accepted before the end are answered within this time."""
_HEAD_BYTES = 16 << 10
_MOST = 200
"""Open connections; further ones are closed at once."""
_BODY = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="10">
<meta name="viewport" content="width=device-width"><title>The web page cannot start</title></head>
<body><h1>The web page cannot start</h1>
<p>The coordinator works, but the process that serves this page ends at its start.
The coordinator's log has the reason before its line "web_process_ended".
The coordinator starts the process again at least every 30 seconds, and this page tries again by itself.</p>
</body></html>
"""
_HEAD = (
    b"""HTTP/1.1 503 Service Unavailable
Content-Type: text/html; charset=utf-8
Content-Length: %d
Retry-After: 10
Cache-Control: no-store
Connection: close
Content-Security-Policy: default-src 'none'; base-uri 'none'; frame-ancestors 'none'
X-Content-Type-Options: nosniff
Referrer-Policy: no-referrer

""".replace(b"\n", b"\r\n")
    % len(_BODY)
)


class _Answers:
    """The open connections."""

    def __init__(self) -> None:
        self._open = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Wait for the end of a request's headers, answer, and close."""
        self._open += 1
        try:
            with suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_REQUEST_S if self._open <= _MOST else 0):
                    request = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_HEAD if request.startswith(b"HEAD ") else _HEAD + _BODY)
                    await writer.drain()
        finally:
            self._open -= 1
            writer.close()


def _tls(given: dict[str, Any] | None) -> ssl.SSLContext | None:
    """TLS as the page has it; None without. Raises OSError, ssl.SSLError."""
    if given is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2 if given["min_version"] == "1.2" else ssl.TLSVersion.TLSv1_3
    with open(os.memfd_create("page"), "w") as file:  # noqa: PTH123 - the library reads certificates from a file only
        file.write(f"{given['cert']}\n{given['key']}")
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


async def _serve(settings: dict[str, Any]) -> None:
    tls = _tls(settings["tls"])
    server = await asyncio.start_server(
        _Answers().answer,
        sock=socket.socket(fileno=settings["listening"]),
        limit=_HEAD_BYTES,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else _REQUEST_S,
    )
    async with server:
        await asyncio.to_thread(_input_ends)
    await asyncio.sleep(_END_S)


def _input_ends() -> None:
    """Wait for it in a thread: it is the pipe of the coordinator, which may be gone."""
    while sys.stdin.buffer.read(4096):
        pass


if __name__ == "__main__":
    asyncio.run(_serve(json.loads(sys.stdin.buffer.readline())))
