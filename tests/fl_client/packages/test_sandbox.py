"""What the process of a package may not do, tried in a process that has limited itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LIMITED = """
import os, resource, signal, socket, subprocess, threading
from fl_client.packages.sandbox import limit
started = threading.Event()
def wait():
    started.wait()
    refused(os.fork)
earlier = threading.Thread(target=wait)
earlier.start()
limit(64 << 20, 1 << 20, 64)
def refused(call):
    try:
        call()
    except (OSError, MemoryError) as error:
        print(type(error).__name__)
    else:
        print("done")
def large():
    with open(os.devnull.replace("null", "shm/") + f"packages-{os.getpid()}", "wb") as file:
        os.unlink(file.name)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        file.write(bytes(2 << 20))
        file.flush()
"""
CALLS = {
    "another process": ("os.fork", "PermissionError"),
    "another program": ("lambda: os.execv('/bin/true', ['true'])", "PermissionError"),
    "a program": ("lambda: subprocess.run(['/bin/true'])", "PermissionError"),
    "the network": ("socket.socket", "PermissionError"),
    "a local service": ("lambda: socket.socket(socket.AF_UNIX)", "PermissionError"),
    "a signal to its parent": ("lambda: os.kill(os.getppid(), 0)", "PermissionError"),
    "memory": ("lambda: bytearray(256 << 20)", "MemoryError"),
    "a large file": ("large", "OSError"),
    "some memory": ("lambda: bytearray(16 << 20)", "done"),
    "a thread": ("lambda: threading.Thread(target=int).start()", "done"),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_of_a_limited_process(call: str) -> None:
    """What is refused is an error of the code that tries it, also in a thread that was there before."""
    code, outcome = CALLS[call]
    script = f"{_LIMITED}refused({code})\nstarted.set()\nearlier.join()\n"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines() == [outcome, "PermissionError"], done.stderr
