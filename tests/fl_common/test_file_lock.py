"""A lock on a file that ends with its process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fl_common.file_lock import FileLock, FileLocked

HOLDER = """
import sys
from pathlib import Path
from fl_common.file_lock import FileLock
lock = FileLock(Path(sys.argv[1]), "holder")
print("locked", flush=True)
sys.stdin.read()
"""
FORKER = """
import os, sys, time
from pathlib import Path
from fl_common.file_lock import FileLock, FileLocked
lock = FileLock(Path(sys.argv[1]), "parent")
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    os.read(read, 1)  # returns when the parent has ended
    for _ in range(500):
        try:
            lock = FileLock(Path(sys.argv[1]), "child")
            print("child", flush=True)
            break
        except FileLocked:
            time.sleep(0.01)  # the kernel closes the files of a killed process one after the other
    os._exit(0)
os.kill(os.getpid(), 9)
"""


def start(program: str, path: Path) -> subprocess.Popen[str]:
    """Start a process that locks the file."""
    command = [sys.executable, "-c", program, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_killed_process_releases_its_lock(tmp_path: Path) -> None:
    """While it lives, a second process gets the text that it wrote into the file."""
    path = tmp_path / "lock"
    with start(HOLDER, path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(FileLocked) as locked:
            FileLock(path, "second")
        assert (locked.value.holder, path.read_text()) == ("holder", "holder")
        holder.kill()
        assert holder.wait() == -signal.SIGKILL
        FileLock(path, "second").release()


def test_a_fork_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A forked child shares its parent's lock unless it closes its copy: here it takes the lock after the parent."""
    with start(FORKER, tmp_path / "lock") as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "child\n"
        assert parent.wait() == -signal.SIGKILL


def test_a_second_lock_in_one_process_is_refused(tmp_path: Path) -> None:
    """The lock is between holders, not between processes only."""
    lock = FileLock(tmp_path / "lock", "first")
    with pytest.raises(FileLocked):
        FileLock(tmp_path / "lock", "second")
    lock.release()


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    """A second release is no error, and a longer text of an earlier holder does not show."""
    lock = FileLock(tmp_path / "lock", "a long text")
    lock.release()
    lock.release()
    again = FileLock(tmp_path / "lock", "short")
    assert (tmp_path / "lock").read_text() == "short"
    again.release()


def test_a_lock_that_cannot_write_its_text_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves no lock behind."""

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(OSError, match="No space"):
            FileLock(tmp_path / "lock", "holder")
    FileLock(tmp_path / "lock", "holder").release()
