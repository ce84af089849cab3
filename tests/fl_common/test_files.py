"""Files that appear whole or not at all, locks on files, and permissions of private keys and state directories."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_common import files
from fl_common.files import FileLock, FileLocked, atomic_writer, check_private_key, make_folders, restrict_permissions
from fl_common.settings import SettingsError


def names(folder: Path) -> list[str]:
    """Everything in the folder."""
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("part", ["file.part", None], ids=["fixed name", "unique name"])
def test_a_file_appears_only_when_it_is_complete(tmp_path: Path, part: str | None) -> None:
    """Before the end of the block the old content is there, and nothing else is left afterwards."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with atomic_writer(path, part=tmp_path / part if part else None) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert (path.read_bytes(), names(tmp_path)) == (b"new", ["file"])


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "ended"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    """Whatever ended the block, the temporary file is removed."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write() -> None:
        with atomic_writer(path) as file:
            file.write(b"ne")
            raise error

    with pytest.raises(type(error)):
        write()
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["file"])


def test_a_longer_leftover_is_written_over_and_cut(tmp_path: Path) -> None:
    """A temporary file of a killed process does not show in the new one."""
    part = tmp_path / "file.part"
    part.write_bytes(b"a long leftover")
    with atomic_writer(tmp_path / "file", part=part) as file:
        file.write(b"short")
    assert ((tmp_path / "file").read_bytes(), names(tmp_path)) == (b"short", ["file"])


def test_without_replacement_an_existing_file_stays(tmp_path: Path) -> None:
    """Also one that another process makes while this one writes."""
    path = tmp_path / "file"

    def write() -> None:
        with atomic_writer(path, replace=False) as file:
            file.write(b"late")
            path.write_bytes(b"early")

    with pytest.raises(FileExistsError):
        write()
    assert (path.read_bytes(), names(tmp_path)) == (b"early", ["file"])


def test_a_file_with_a_unique_temporary_name_is_private(tmp_path: Path) -> None:
    """It may hold a key, and the caller widens its mode when it does not."""
    with atomic_writer(tmp_path / "file", replace=False) as file:
        file.write(b"key")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


@pytest.mark.parametrize(("durable", "expected"), [(True, ["file", "folder"]), (False, [])])
def test_content_is_synced_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, expected: list[str]
) -> None:
    """First the file, under its temporary name, then the folder with the new name."""
    synced: list[str] = []

    def fsync(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        assert (tmp_path / "file").exists() == is_folder
        synced.append("folder" if is_folder else "file")

    monkeypatch.setattr(os, "fsync", fsync)
    with atomic_writer(tmp_path / "file", durable=durable) as file:
        file.write(b"content")
    assert synced == expected


def test_missing_folders_are_made_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new name is durable; existing folders are left alone."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    make_folders(tmp_path / "a" / "b", durable=True)
    assert synced == [tmp_path.stat().st_ino, (tmp_path / "a").stat().st_ino]
    make_folders(tmp_path / "a" / "b", durable=True)
    make_folders(tmp_path / "c", durable=False)
    assert len(synced) == 2


HOLDER = """
import sys
from pathlib import Path
from fl_common.files import FileLock
lock = FileLock(Path(sys.argv[1]), "holder")
print("locked", flush=True)
sys.stdin.read()
"""
FORKER = """
import os, sys, time
from pathlib import Path
from fl_common.files import FileLock, FileLocked
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


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A key's file."""
    path = tmp_path / "tls.key"
    path.touch(0o600)
    return path


class Seen:
    """A process of user 10001 in the groups 10001 and 20, and the owner and mode that a file of it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        monkeypatch.setattr(os, "geteuid", lambda: 10001)
        monkeypatch.setattr(os, "getegid", lambda: 10001)
        monkeypatch.setattr(os, "getgroups", lambda: [20])

    def file(self, mode: int, uid: int, gid: int) -> None:
        """The stat result of every file from now on."""
        found = SimpleNamespace(st_mode=stat.S_IFREG | mode, st_uid=uid, st_gid=gid)
        self._patch.setattr(Path, "stat", lambda *_, **__: found)


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "taken"),
    [
        pytest.param(0o600, 10001, 10001, True, id="own"),
        pytest.param(0o400, 10001, 10001, True, id="own-read-only"),
        pytest.param(0o640, 10001, 10001, False, id="own-and-group"),
        pytest.param(0o644, 10001, 10001, False, id="own-and-all"),
        pytest.param(0o440, 0, 10001, True, id="secret-with-fsGroup"),
        pytest.param(0o640, 0, 20, True, id="roots-for-a-group-of-ours"),
        pytest.param(0o660, 0, 10001, False, id="group-may-write"),
        pytest.param(0o444, 0, 0, False, id="secret-by-default"),
        pytest.param(0o440, 0, 99, False, id="group-of-others"),
        pytest.param(0o404, 0, 10001, False, id="all-and-not-the-group"),
    ],
)
def test_who_else_may_read_a_key(monkeypatch: pytest.MonkeyPatch, mode: int, uid: int, gid: int, taken: bool) -> None:
    """Only its owner may read it; a group of this process may read another user's file."""
    Seen(monkeypatch).file(mode, uid, gid)
    if taken:
        check_private_key(Path("tls.key"), "tls.key")
        return
    with pytest.raises(SettingsError, match=rf"tls.key: expected .* got tls.key with mode {mode:04o}: chmod 600 tls"):
        check_private_key(Path("tls.key"), "tls.key")


def test_a_key_that_all_may_read_is_refused(key: Path) -> None:
    """It is checked on a real file. A missing file is reported by its reader, and the mode of a pipe does not count."""
    check_private_key(key, "tls.key")
    key.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        check_private_key(key, "tls.key")
    check_private_key(key.parent / "nothing", "tls.key")
    os.mkfifo(key.parent / "pipe", 0o666)
    (key.parent / "pipe").chmod(0o666)
    check_private_key(key.parent / "pipe", "tls.key")


def modes(folder: Path) -> dict[str, int]:
    """The modes of a folder and all in it, by name."""
    paths = (folder, *folder.rglob("*"))
    return {path.name: stat.S_IMODE(path.lstat().st_mode) for path in paths if not path.is_symlink()}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory that an earlier version made, with a link out of it."""
    folder = tmp_path / "state"
    (folder / "pending" / "deep").mkdir(parents=True)
    for name in ("lock", "pending/update", "pending/deep/file"):
        (folder / name).touch()
        (folder / name).chmod(0o664)
    for made in (folder, folder / "pending", folder / "pending" / "deep"):
        made.chmod(0o755)
    (tmp_path / "outside").touch()
    (tmp_path / "outside").chmod(0o644)
    (folder / "pending" / "link").symlink_to(tmp_path / "outside")
    return folder


def test_existing_files_are_restricted(state: Path) -> None:
    """Folders 0700, files 0600; a link's target stays."""
    assert restrict_permissions(state) == []
    assert set(modes(state).values()) == {0o700, 0o600}
    assert stat.S_IMODE((state.parent / "outside").stat().st_mode) == 0o644
    before = {path: path.lstat().st_ctime_ns for path in state.rglob("*")}
    assert restrict_permissions(state) == []
    assert {path: path.lstat().st_ctime_ns for path in state.rglob("*")} == before


def test_a_folder_with_other_things_in_it_stays(state: Path) -> None:
    """A daemon with other files in its folder changes only its own."""
    (state / "thesis.tex").touch()
    (state / "thesis.tex").chmod(0o644)
    assert restrict_permissions(state, ["lock", "pending"]) == []
    found = modes(state)
    assert (found["state"], found["thesis.tex"], found["lock"], found["pending"]) == (0o755, 0o644, 0o600, 0o700)


def test_files_of_other_users_are_reported(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only files that all users may write; the mode of a volume's folder is not changed."""
    (state / "lock").chmod(0o666)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert restrict_permissions(state) == [state / "lock"]


def test_files_are_private_from_the_start(tmp_path: Path) -> None:
    """Whatever the shell's mask was."""
    before = os.umask(0o022)
    try:
        files.set_private_umask()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").touch()
    finally:
        os.umask(before)
    assert (modes(tmp_path)["folder"], modes(tmp_path)["file"]) == (0o700, 0o600)
