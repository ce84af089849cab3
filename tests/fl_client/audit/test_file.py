"""The file of the device's audit log: rotation, torn lines, a full disk, and a folder that was removed."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest

from fl_client.audit.file import RECOVERED, AuditFile, Entry, rows_in
from fl_client.storage.state import AUDIT
from fl_common.audit import AuditRow, ChainCheck


def entries(*methods: str) -> list[Entry]:
    """Rows to add."""
    return [Entry(10**15, {"method": method, "detail": "x" * 50}) for method in methods]


def methods(folder: Path) -> list[str]:
    """The methods of all rows, after a check of their chain."""
    rows = list(rows_in(folder))
    assert problems(rows) == []
    return [row.method for row in rows]


def problems(rows: Sequence[AuditRow]) -> list[str]:
    """What a check of the chain finds."""
    check = ChainCheck((), None)
    for row in rows:
        check.add(row)
    return [problem.what for problem in check.end()]


def test_rows_are_added_and_a_restart_continues(tmp_path: Path) -> None:
    """The file is for its owner only."""
    first = AuditFile(tmp_path)
    first.append(entries("a", "b"))
    first.append(entries("c"))
    AuditFile(tmp_path).append(entries("d"))
    assert methods(tmp_path) == ["a", "b", "c", "d"]
    assert [row.number for row in rows_in(tmp_path)] == [1, 2, 3, 4]
    assert stat.S_IMODE((tmp_path / AUDIT[0]).stat().st_mode) == 0o600


def test_the_disk_space_is_limited_and_the_chain_is_carried_over(tmp_path: Path) -> None:
    """The oldest rows are removed. A check takes the first row that is left as it is."""
    log = AuditFile(tmp_path, 2000)
    for number in range(100):
        log.append(entries(str(number)))
    assert sum((tmp_path / name).stat().st_size for name in AUDIT) <= 2000 * len(AUDIT)
    found = methods(tmp_path)
    assert found == [str(number) for number in range(100 - len(found), 100)]
    assert 10 < len(found) < 60
    AuditFile(tmp_path, 2000).append(entries("later"))
    assert methods(tmp_path)[-1] == "later"


def test_a_missing_file_between_the_others_is_found(tmp_path: Path) -> None:
    """Rotation removes the oldest only."""
    log = AuditFile(tmp_path, 2000)
    for number in range(40):
        log.append(entries(str(number)))
    (tmp_path / AUDIT[2]).unlink()
    [problem] = problems(list(rows_in(tmp_path)))
    assert "missing" in problem


def test_a_kill_between_the_files_loses_nothing(tmp_path: Path) -> None:
    """The newest file was moved away, and the next one is not there yet."""
    AuditFile(tmp_path).append(entries("a", "b"))
    (tmp_path / AUDIT[0]).rename(tmp_path / AUDIT[1])
    AuditFile(tmp_path).append(entries("c"))
    assert methods(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("kept", range(0, 200, 23))
def test_a_torn_line_is_removed_and_named(tmp_path: Path, kept: int) -> None:
    """The process was killed in the middle of a write."""
    AuditFile(tmp_path).append(entries("a"))
    path = tmp_path / AUDIT[0]
    whole = path.read_bytes()
    line = whole.replace(b'"number":1', b'"number":2')[: kept or 1]
    path.write_bytes(whole + line)
    assert [row.method for row in rows_in(tmp_path)] == ["a"]
    AuditFile(tmp_path).append(entries("b"))
    assert methods(tmp_path) == ["a", RECOVERED, "b"]
    assert list(rows_in(tmp_path))[1].detail == f"{len(line)} bytes of an incomplete line were removed"


def test_a_file_of_one_torn_line_begins_anew(tmp_path: Path) -> None:
    """There is nothing to continue."""
    (tmp_path / AUDIT[0]).write_bytes(b'{"numb')
    AuditFile(tmp_path).append(entries("a"))
    assert methods(tmp_path) == [RECOVERED, "a"]


def test_lines_that_are_no_rows_are_kept_and_named(tmp_path: Path) -> None:
    """A damaged disk, or an editor. New rows continue behind the last row that can be read."""
    AuditFile(tmp_path).append(entries("a"))
    with (tmp_path / AUDIT[0]).open("ab") as file:
        file.write(b"\0\0\0\nnonsense\n")
    AuditFile(tmp_path).append(entries("b"))
    with pytest.raises(ValueError, match=r"audit.jsonl: line 2 is no row"):
        list(rows_in(tmp_path))
    lines = (tmp_path / AUDIT[0]).read_bytes().splitlines()
    rows = [AuditRow.from_json(line) for line in (lines[0], *lines[3:])]
    assert problems(rows) == []
    assert rows[1].detail == "the end of audit.jsonl has 2 lines that cannot be read"


def test_a_full_disk_writes_nothing_and_the_next_row_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a part of the row had room."""
    log = AuditFile(tmp_path)
    log.append(entries("a"))
    size = (tmp_path / AUDIT[0]).stat().st_size
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]))
    with pytest.raises(OSError, match="wrote 20 of"):
        log.append(entries("b"))
    assert (tmp_path / AUDIT[0]).stat().st_size == size

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"):
        log.append(entries("b"))
    monkeypatch.undo()
    log.append(entries("c"))
    assert methods(tmp_path) == ["a", "c"]


def test_a_removed_folder_is_used_when_it_is_there_again(tmp_path: Path) -> None:
    """A disk that was pulled out and put back empty: the chain goes on, and its beginning is missing."""
    folder = tmp_path / "state"
    folder.mkdir()
    log = AuditFile(folder)
    log.append(entries("a"))
    (folder / AUDIT[0]).unlink()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        log.append(entries("b"))
    folder.mkdir()
    log.append(entries("c"))
    assert methods(folder) == ["c"]


def test_an_edited_row_is_found(tmp_path: Path) -> None:
    """As in the coordinator's log."""
    AuditFile(tmp_path).append(entries("a", "b", "c"))
    path = tmp_path / AUDIT[0]
    path.write_bytes(path.read_bytes().replace(b'"method":"b"', b'"method":"B"'))
    [problem] = problems(list(rows_in(tmp_path)))
    assert "row 2 was changed" in problem
