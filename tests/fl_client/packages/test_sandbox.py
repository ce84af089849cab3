"""What the process of a package may not do, tried in a process that has limited itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fl_client.packages import landlock

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


_HIDDEN = """
import os, sys
from pathlib import Path
from fl_client.packages.landlock import hide
folder = Path(sys.argv[1])
assert hide([folder / "state" / "key", folder / "state" / "later"], [folder / "state" / "key" / "modules"])
def tried(name, call):
    try:
        call()
    except OSError as error:
        print(name, type(error).__name__)
    else:
        print(name, "done")
(folder / "beside" / "new").write_text("new")
"""
ACCESSES = {
    "read": ("(folder / 'state/key/secret').read_text()", "PermissionError"),
    "list": ("os.listdir(folder / 'state/key')", "PermissionError"),
    "write": ("(folder / 'state/key/secret').write_text('')", "PermissionError"),
    "add": ("(folder / 'state/key/more').write_text('')", "PermissionError"),
    "by a link": ("(folder / 'beside/link').read_text()", "PermissionError"),
    "by a new link": ("os.link(folder / 'state/key/secret', folder / 'beside/hard')", "OSError"),
    "by another process": ("open(f'/proc/{os.getppid()}/root{folder}/state/key/secret').read()", "PermissionError"),
    "by moving it": ("os.rename(folder / 'state/key', folder / 'beside/key')", "PermissionError"),
    "what comes later": ("(folder / 'state/later').write_text('')", "PermissionError"),
    "its modules": ("(folder / 'state/key/modules/task.py').read_text()", "done"),
    "to change its modules": ("(folder / 'state/key/modules/task.py').write_text('')", "PermissionError"),
    "beside": ("(folder / 'beside/file').read_text()", "done"),
    "to write beside": ("os.rename(folder / 'beside/new', folder / 'beside/newer')", "done"),
    "in the state": ("(folder / 'state/other').read_text()", "done"),
    "another program": ("os.stat(sys.executable)", "done"),
}


@pytest.mark.skipif(not landlock.version(), reason="the kernel has no Landlock")
def test_what_is_hidden_from_a_process_is_beyond_its_reach(tmp_path: Path) -> None:
    """By any path, link or other process; what is beside it stays, and its own modules can be read."""
    for path in ("state/key/modules", "beside"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("state/key/secret", "state/key/modules/task.py", "state/other", "beside/file"):
        (tmp_path / path).write_text("here")
    (tmp_path / "beside" / "link").symlink_to(tmp_path / "state" / "key" / "secret")
    script = _HIDDEN + "".join(f"tried({name!r}, lambda: {call})\n" for name, (call, _) in ACCESSES.items())
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == [f"{name} {outcome}" for name, (_, outcome) in ACCESSES.items()], done.stderr
    assert (tmp_path / "state" / "key" / "secret").read_text() == "here"
