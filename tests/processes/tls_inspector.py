"""A proxy that opens TLS to look inside, as a process of its own: its own authority made the certificate it shows."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.processes.process import ROOT


@contextmanager
def tls_inspector(upstream: str, cert: Path, key: Path) -> Iterator[str]:
    """An inspector in front of host:port; its own host:port. cert, key: what it shows to its callers."""
    command = [sys.executable, "-m", "tests.processes.tls_inspector", upstream, str(cert), str(key)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _serve(upstream: str, cert: str, key: str) -> None:
    host, _, port = upstream.rpartition(":")
    inside, outside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    inside.load_cert_chain(cert, key)
    outside.check_hostname, outside.verify_mode = False, ssl.CERT_NONE
    for context in (inside, outside):
        context.set_alpn_protocols(["h2"])

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(host, int(port), ssl=outside)
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0, ssl=inside)
    listening = server.sockets[0].getsockname()
    sys.stdout.write(f"{listening[0]}:{listening[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(*sys.argv[1:]))
