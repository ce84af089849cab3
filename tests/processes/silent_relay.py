"""A TCP relay as a process of its own that forgets connections after a silence, as NATs and load balancers do.

It sends no end of the connection: what comes later is dropped.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.processes.process import ROOT


@contextmanager
def silent_relay(upstream: str, seconds: float) -> Iterator[str]:
    """A relay to host:port; its own host:port. seconds: the silence after which a connection is forgotten."""
    command = [sys.executable, "-m", "tests.processes.silent_relay", upstream, str(seconds)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


class _Forgetful:
    """One connection."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last, self._forgotten = seconds, time.monotonic(), False

    def passes(self) -> bool:
        """Whether a part that came now goes on."""
        now = time.monotonic()
        self._forgotten |= now - self._last > self._seconds
        self._last = now
        return not self._forgotten

    async def copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy in one direction until its end."""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if self.passes():
                    writer.write(data)
                    await writer.drain()
        if not self._forgotten:
            writer.close()


async def _serve(upstream: str, seconds: float) -> None:
    host, _, port = upstream.rpartition(":")

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, connection = await asyncio.open_connection(host, int(port)), _Forgetful(seconds)
        await asyncio.gather(connection.copy(reader, there[1]), connection.copy(there[0], writer))

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    listening = server.sockets[0].getsockname()
    sys.stdout.write(f"{listening[0]}:{listening[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], float(sys.argv[2])))
