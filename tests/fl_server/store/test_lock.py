"""One coordinator a state directory, and only in a directory of its own."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fl_server.store import lock as lock_module
from fl_server.store.lock import DirectoryLocked, StateDirectoryError, lock_directory
from fl_server.store.ownership import Home

HOLDER = """
import sys
from fl_server.store.ownership import Home
from fl_server.store.lock import lock_directory
lock = lock_directory(sys.argv[1])
print("locked", flush=True)
sys.stdin.read()
"""
FORKER = """
import os, sys, time
from fl_server.store.ownership import Home
from fl_server.store.lock import DirectoryLocked, lock_directory
lock = lock_directory(sys.argv[1])
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    os.read(read, 1)  # lives as long as its parent, and a little longer
    for _ in range(500):
        try:
            print(lock_directory(sys.argv[1]).path.name, flush=True)
            break
        except DirectoryLocked:
            time.sleep(0.01)  # the kernel closes a killed process's files one after the other
    os._exit(0)
os.kill(os.getpid(), 9)
"""


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    """A process of its own on the folder."""
    command = [sys.executable, "-c", program, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state directory that is not there yet."""
    return tmp_path / "deep" / "state"


def test_a_new_directory_is_made_and_marked(folder: Path) -> None:
    """The marker says whose it is, the lock file who has it."""
    with lock_directory(folder) as lock:
        assert lock.path == folder
        marker = json.loads((folder / "impetus-state.json").read_text())
        assert marker == {"program": "impetus-coordinator", "format": 1, "id": lock.home.id}
        assert json.loads((folder / "lock").read_text())["pid"] == os.getpid()


def test_a_directory_keeps_its_id_and_its_ledgers(folder: Path) -> None:
    """Over restarts; a directory of an older version, whose marker names neither, gets them."""
    folder.mkdir(parents=True)
    (folder / "impetus-state.json").write_text('{"program": "impetus-coordinator", "format": 1}')
    with lock_directory(folder) as lock:
        first = lock.home
        lock.keep_ledger("abc")
    with lock_directory(folder) as lock:
        assert lock.home == Home(first.id, "abc")
    assert (len(first.id), first.ledger) == (32, "")


def test_a_second_process_is_told_who_holds_it(folder: Path) -> None:
    """The refusal names process and time and says what to do; when the holder is killed the lock is free at once."""
    with start(HOLDER, folder) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(DirectoryLocked, match=rf"process {holder.pid} on host .*, since 20\d\d-.*; stop it first"):
            lock_directory(folder)
        holder.kill()
        assert holder.wait() == -signal.SIGKILL
        lock_directory(folder).release()


def test_a_second_lock_in_one_process_is_refused(folder: Path) -> None:
    """The lock is between coordinators, not between processes only."""
    with lock_directory(folder), pytest.raises(DirectoryLocked, match=f"process {os.getpid()} "):
        lock_directory(folder)


def test_a_released_directory_can_be_locked_again(folder: Path) -> None:
    """Releasing twice is no error, and the marker of the first start is accepted."""
    lock = lock_directory(folder)
    lock.release()
    lock.release()
    lock_directory(folder).release()


def test_a_worker_that_outlives_the_coordinator_does_not_hold_the_lock(folder: Path) -> None:
    """A forked child shares its parent's lock unless it closes its copy: here it takes the killed parent's place."""
    with start(FORKER, folder) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "state\n"
        assert parent.wait() == -signal.SIGKILL


@pytest.mark.parametrize("name", ["lost+found", "lock", "impetus-state.json.part"])
def test_a_new_volume_may_hold_harmless_names(folder: Path, name: str) -> None:
    """What a fresh volume brings, or a first start that was cut short leaves, is not somebody's state."""
    folder.mkdir(parents=True)
    (folder / name).touch()
    lock_directory(folder).release()


def test_a_directory_of_other_things_is_refused(folder: Path) -> None:
    """Nothing is written among somebody's files."""
    folder.mkdir(parents=True)
    (folder / "thesis.tex").touch()
    with pytest.raises(StateDirectoryError, match=r"it holds thesis.tex and no impetus-state.json; name an empty"):
        lock_directory(folder)
    assert [each.name for each in folder.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ('{"program": "impetus-client", "format": 1}', "belongs to 'impetus-client'.*expected 'impetus-coordinator'"),
        ('{"program": "impetus-coordinator", "format": 2}', "state format 2; this program knows 1: start the version"),
        ("torn", "belongs to 'something unknown'"),
    ],
    ids=["a daemon's", "newer", "torn"],
)
def test_a_foreign_marker_is_refused(folder: Path, marker: str, message: str) -> None:
    """The marker decides, and the refusal says what it says."""
    folder.mkdir(parents=True)
    (folder / "impetus-state.json").write_text(marker)
    with pytest.raises(StateDirectoryError, match=message):
        lock_directory(folder)
    assert not (folder / "lock").exists()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_is_no_directory(tmp_path: Path, place: str) -> None:
    """Neither a file nor a path through one can be a state directory."""
    (tmp_path / "file").touch()
    with pytest.raises(StateDirectoryError, match="is not a directory: name a directory"):
        lock_directory(tmp_path / place)


def test_an_unwritable_directory_is_refused_in_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal names directory and cause; rights are simulated, for an administrator has them all."""

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(lock_module.os, "open", refuse)
    with pytest.raises(
        StateDirectoryError, match=rf"cannot write in the state directory {folder} \(Permission denied\)"
    ):
        lock_directory(folder)


def test_a_failed_marker_gives_the_lock_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at the first start leaves no lock that this process would run into."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(lock_module, "write_durably", refuse)
        with pytest.raises(StateDirectoryError, match="No space left on device"):
            lock_directory(folder)
    lock_directory(folder).release()
