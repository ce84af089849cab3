"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fl_common.atomic_files import atomic_writer, make_folders


def names(folder: Path) -> list[str]:
    """Everything in the folder."""
    return sorted(each.name for each in folder.iterdir())


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
