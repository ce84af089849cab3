"""Console scripts in forked processes: a shell starts `fl-server`, `fl-client` and `fl` without their imports.

Each script in `folder` is a small client. It sends its arguments, environment, folder and standard streams to this
process, which starts the program from the forkserver, and it ends with the program's exit code. Signals are passed on,
and a script that is killed takes its program with it.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import tomllib
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import reduction
from pathlib import Path
from typing import Any, Self

from tests.processes.forks import context
from tests.processes.process import ROOT, TIMEOUT_S

CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = [{entry!r}, [{name!r}, *sys.argv[1:]], dict(os.environ), os.getcwd()]
data = json.dumps(request).encode()
socket.send_fds(server, [len(data).to_bytes(4, "big")], [0, 1, 2])
server.sendall(data)
pid = int(server.recv(16))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
server.sendall(b"x")
code = int(server.recv(16) or b"-9")
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def entries() -> dict[str, str]:
    """Console scripts of pyproject.toml: name -> module:function."""
    scripts: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    return scripts


class Scripts:
    """Writes the scripts and serves them; a context manager that ends all programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        address = str(folder / "socket")
        for name, entry in entries().items():
            path = folder / name
            path.write_text(CLIENT.format(python=sys.executable, address=address, entry=entry, name=name))
            path.chmod(0o755)
        python = folder / "python"  # no link: it would not find its virtual environment
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen()
        self._running: list[multiprocessing.Process] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for process in self._running:
            process.kill()
            process.join(TIMEOUT_S)

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Start the program of one client, and report its end or notice the client's."""
        with client:
            size, streams, _, _ = socket.recv_fds(client, 4, 3)
            data = b""
            while len(data) < int.from_bytes(size, "big"):
                data += client.recv(1 << 16)
            process: Any = context().Process(target=_run, args=(data, [_Stream(each) for each in streams]))
            process.start()
            self._running.append(process)
            for each in streams:
                os.close(each)
            client.sendall(str(process.pid).encode())
            client.recv(1)
            ended = threading.Thread(target=_watch, args=(client, process), daemon=True)
            ended.start()
            process.join()
            try:
                client.sendall(str(process.exitcode).encode())
                client.shutdown(socket.SHUT_RDWR)
            except OSError:  # the client was killed
                return
            finally:
                ended.join(TIMEOUT_S)


def _watch(client: socket.socket, process: multiprocessing.Process) -> None:
    """Kill the program when its script was killed."""
    with suppress(OSError):
        client.recv(1)
    if process.is_alive():
        process.kill()


class _Stream:
    """A descriptor that becomes one of the child."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detached, (reduction.DupFd(self._descriptor),)


def _detached(descriptor: Any) -> int:
    return int(descriptor.detach())


def _run(data: bytes, streams: list[int]) -> None:
    """Run the console script in the child, as the installed script would."""
    entry, arguments, environment, folder = json.loads(data)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - descriptors
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = arguments
    module, _, function = entry.partition(":")
    sys.exit(getattr(importlib.import_module(module), function)())
