"""Permissions of private keys and state directories."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_common import file_permissions
from fl_common.file_permissions import check_private_key, restrict_permissions
from fl_common.settings import SettingsError


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
    for each in (folder, folder / "pending", folder / "pending" / "deep"):
        each.chmod(0o755)
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
        file_permissions.set_private_umask()
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file").touch()
    finally:
        os.umask(before)
    assert (modes(tmp_path)["folder"], modes(tmp_path)["file"]) == (0o700, 0o600)
