"""A state directory has one coordinator, and no files of other programs."""

import json
import os
from pathlib import Path

import pytest

from fl_server.store import state_directory
from fl_server.store.database.transactions import Home
from fl_server.store.state_directory import DirectoryLocked, StateDirectoryError, lock_directory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state directory that does not exist yet."""
    return tmp_path / "deep" / "state"


def test_a_new_directory_is_created_and_marked(folder: Path) -> None:
    """The marker names the program and the id, the lock file the process."""
    with lock_directory(folder) as lock:
        assert lock.path == folder
        marker = json.loads((folder / "impetus-state.json").read_text())
        assert marker == {"program": "impetus-coordinator", "format": 1, "id": lock.home.id}
        assert json.loads((folder / "lock").read_text())["pid"] == os.getpid()


def test_a_directory_keeps_its_id_and_its_ledger(folder: Path) -> None:
    """Across restarts."""
    with lock_directory(folder) as lock:
        first = lock.home
        lock.keep_ledger("abc")
    with lock_directory(folder) as lock:
        assert lock.home == Home(first.id, "abc")
    assert (len(first.id), first.ledger) == (32, "")


def test_a_second_coordinator_is_refused(folder: Path) -> None:
    """The error names process, host and start of the first one, and advises what to do."""
    message = rf"process {os.getpid()} on host .*, since 20\d\d-.*; stop it first"
    with lock_directory(folder), pytest.raises(DirectoryLocked, match=message):
        lock_directory(folder)


def test_a_released_directory_can_be_locked_again(folder: Path) -> None:
    """Releasing twice is no error, and the marker of the first start is accepted."""
    lock = lock_directory(folder)
    lock.release()
    lock.release()
    with lock_directory(folder) as again:
        assert again.home == lock.home


@pytest.mark.parametrize("name", ["lost+found", "lock", "impetus-state.json.part"])
def test_a_new_volume_may_hold_harmless_names(folder: Path, name: str) -> None:
    """Files of a new volume and of an interrupted first start are accepted."""
    folder.mkdir(parents=True)
    (folder / name).touch()
    with lock_directory(folder) as lock:
        assert lock.home.ledger == ""


def test_a_directory_with_other_files_is_refused(folder: Path) -> None:
    """Nothing is written into it."""
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
        ('{"program": "impetus-coordinator", "format": 1}', "expected the directory's id in .*: restore the file"),
        ("torn", "belongs to 'something unknown'"),
    ],
    ids=["a daemon's", "newer", "without an id", "torn"],
)
def test_a_foreign_marker_is_refused(folder: Path, marker: str, message: str) -> None:
    """The error has the contents of the marker."""
    folder.mkdir(parents=True)
    (folder / "impetus-state.json").write_text(marker)
    with pytest.raises(StateDirectoryError, match=message):
        lock_directory(folder)
    assert not (folder / "lock").exists()


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_path_that_is_not_a_directory_is_refused(tmp_path: Path, place: str) -> None:
    """A file, and a path below a file."""
    (tmp_path / "file").touch()
    with pytest.raises(StateDirectoryError, match="is not a directory: name a directory"):
        lock_directory(tmp_path / place)


def test_an_unwritable_directory_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names directory and cause. The missing permission is simulated, because root has every permission."""

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", refuse)
    with pytest.raises(
        StateDirectoryError, match=rf"cannot write in the state directory {folder} \(Permission denied\)"
    ):
        lock_directory(folder)


def test_a_failed_marker_releases_the_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a full disk at the first start the same process can lock the directory."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(state_directory, "atomic_writer", refuse)
        with pytest.raises(StateDirectoryError, match="No space left on device"):
            lock_directory(folder)
    lock_directory(folder).release()
