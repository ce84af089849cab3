"""A state directory that was restored from a copy is noticed, and one that was only used is not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fl_client.storage.state_origin import StateOrigin


def restored_copy(folder: Path) -> StateOrigin:
    """The folder after a backup of it was put in its place."""
    backup = folder.with_name("backup")
    shutil.copytree(folder, backup)
    shutil.rmtree(folder)
    shutil.copytree(backup, folder)
    return StateOrigin(folder)


def test_a_new_folder_and_a_restart_are_no_copies(tmp_path: Path) -> None:
    """Also after other files in the folder were written."""
    folder = tmp_path / "state"
    assert not StateOrigin(folder).restored
    (folder / "other").write_text("1")
    origin = StateOrigin(folder)
    assert (origin.restored, origin.was_restored) == (False, False)


def test_a_restored_backup_is_noticed_until_it_is_settled(tmp_path: Path) -> None:
    """A daemon that dies before it has marked its states notices it again. That there was one stays known."""
    folder = tmp_path / "state"
    StateOrigin(folder)
    assert restored_copy(folder).restored
    origin = StateOrigin(folder)
    assert origin.restored
    origin.settle()
    after = StateOrigin(folder)
    assert (origin.restored, after.restored, after.was_restored) == (False, False, True)


@pytest.mark.parametrize("name", ["origin", "origin.json"])
@pytest.mark.parametrize("damage", ["removed", "other"])
def test_a_missing_or_another_file_counts_as_a_copy(tmp_path: Path, name: str, damage: str) -> None:
    """It proves nothing, whatever the other one says."""
    StateOrigin(tmp_path)
    (tmp_path / "run.member").write_text("what was answered")
    (tmp_path / name).unlink()
    if damage == "other":
        (tmp_path / name).write_text("[1]")
    assert StateOrigin(tmp_path).restored


def test_a_kill_while_the_files_are_made_is_no_copy(tmp_path: Path) -> None:
    """Nothing was answered before both were there."""
    StateOrigin(tmp_path)
    (tmp_path / "origin.json").unlink()
    origin = StateOrigin(tmp_path)
    assert (origin.restored, origin.was_restored) == (False, False)
    assert not StateOrigin(tmp_path).restored


def test_moving_the_directory_is_no_copy(tmp_path: Path) -> None:
    """A rename keeps inodes and times of files."""
    StateOrigin(tmp_path / "state")
    (tmp_path / "state").rename(tmp_path / "moved")
    assert not StateOrigin(tmp_path / "moved").restored
