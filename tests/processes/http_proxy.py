"""A small HTTP proxy as a process of its own: CONNECT only. It logs each request, and leads every name to 127.0.0.1."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.processes.process import ROOT


@dataclass(frozen=True)
class HttpProxy:
    """A running proxy."""

    address: str
    """host:port"""
    log: Path

    @property
    def asked(self) -> list[str]:
        """The host:port of each CONNECT, the oldest first."""
        return [line.split()[1] for line in self.log.read_text().splitlines() if line.startswith("CONNECT ")]


@contextmanager
def http_proxy(folder: Path, status: int = 200, login: str = "") -> Iterator[HttpProxy]:
    """A proxy in a process. status: of its answer; only 200 connects. login: user:password that it asks for, if any."""
    log = folder / f"proxy-{status}.log"
    command = [sys.executable, "-m", "tests.processes.http_proxy", str(log), str(status), login]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield HttpProxy(process.stdout.readline().strip(), log)
        finally:
            process.kill()


async def _serve(log: Path, status: int, login: str) -> None:
    wanted = f"proxy-authorization: basic {b64encode(login.encode()).decode()}".lower()

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request, *headers = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        with log.open("a") as file:
            file.write(f"{request}\n")
        answer = 407 if login and wanted not in map(str.lower, headers) else status
        writer.write(f"HTTP/1.1 {answer} Answer\r\n\r\n".encode())
        if answer != 200:
            writer.close()
            return
        port = int(request.split()[1].rpartition(":")[2])
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))

    server = await asyncio.start_server(serve_one, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    sys.stdout.write(f"{host}:{port}\n")
    sys.stdout.flush()
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    Path(sys.argv[1]).touch()
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
