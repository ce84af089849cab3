"""Updates of a round in files that are written over in the next round."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_ops.simulate.run_files import UpdateFiles


def test_an_update_has_exactly_its_bytes_in_the_file_of_a_longer_one(tmp_path: Path) -> None:
    """The file is used again, and its end is cut off."""
    files = UpdateFiles(tmp_path)
    long = files.write(0, "a", [b"0123456789", b"abc"])
    number = long.stat().st_ino
    files.empty()
    assert not long.exists()
    short = files.write(1, "b", [b"xy"])
    assert (short.read_bytes(), short.stat().st_ino) == (b"xy", number)


def test_a_second_update_of_a_client_replaces_the_first(tmp_path: Path) -> None:
    """An attempt that is repeated writes the same file."""
    files = UpdateFiles(tmp_path)
    assert files.write(0, "a", [b"long update"]) == (path := files.write(0, "a", [b"short"]))
    assert path.read_bytes() == b"short"


@pytest.mark.parametrize("rounds", [1, 5])
def test_no_more_files_are_kept_than_a_round_needs(tmp_path: Path, rounds: int) -> None:
    """The number of files does not grow with the rounds."""
    files = UpdateFiles(tmp_path)
    for number in range(rounds):
        for client in range(3):
            files.write(0, f"{number}-{client}", [b"update"])
        files.empty()
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3
