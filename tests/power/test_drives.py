"""The drive model on worked examples, and the operations of the recorder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.power.drives import ALL, Cut, Drive, Unsynced, after_each
from tests.power.recorder import LEDGER, Committed, Recorder

ROOT = Path(__file__).parents[2]
DRAWN = [Cut(Unsynced.DRAWN, Unsynced.DRAWN, Unsynced.DRAWN, seed) for seed in range(64)]


def recorded(folder: Path, work: Callable[[Path], None]) -> Drive:
    """The drive at the end of the work."""
    recorder = Recorder(folder)
    with recorder.recording():
        work(folder)
    *_, drive = after_each(recorder.record)
    return drive


def sync(path: Path) -> None:
    """Sync a path as the product does."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def test_a_file_with_synced_content_and_name_is_kept(tmp_path: Path) -> None:
    """Other files may be lost."""

    def work(folder: Path) -> None:
        (folder / "a").write_bytes(b"content")
        sync(folder / "a")
        sync(folder)
        (folder / "b").write_bytes(b"lost")

    assert recorded(tmp_path, work).cut(Cut()) == {"a": b"content"}


def test_a_name_without_a_sync_of_its_content_is_an_empty_file(tmp_path: Path) -> None:
    """A rename may be kept without the content that was written before it."""

    def work(folder: Path) -> None:
        (folder / "part").write_bytes(b"content")
        (folder / "part").rename(folder / "whole")

    drive = recorded(tmp_path, work)
    assert drive.cut(Cut()) == {}
    assert drive.cut(Cut(names=Unsynced.KEPT)) == {"whole": b""}
    assert drive.cut(ALL) == {"whole": b"content"}


def test_content_without_a_sync_of_its_name_has_the_old_name(tmp_path: Path) -> None:
    """A rename is kept completely or not at all: both names never exist."""

    def work(folder: Path) -> None:
        (folder / "part").write_bytes(b"content")
        sync(folder / "part")
        sync(folder)
        (folder / "part").rename(folder / "whole")

    drive = recorded(tmp_path, work)
    assert drive.cut(Cut()) == {"part": b"content"}
    assert {tuple(drive.cut(how)) for how in DRAWN} == {("part",), ("whole",)}


def test_the_content_of_a_folder_is_lost_with_its_name(tmp_path: Path) -> None:
    """Syncing a folder does not sync its own name."""

    def work(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_bytes(b"content")
        sync(folder / "inner" / "a")
        sync(folder / "inner")

    drive = recorded(tmp_path, work)
    assert drive.cut(Cut()) == {}
    assert drive.cut(Cut(names=Unsynced.KEPT)) == {"inner": None, "inner/a": b"content"}


def test_overwritten_content_is_torn(tmp_path: Path) -> None:
    """Blocks of 64 bytes are old, new or zero."""

    def work(folder: Path) -> None:
        for letter in (b"o", b"n"):
            (folder / "a").write_bytes(letter * 100)
            if letter == b"o":
                sync(folder / "a")
                sync(folder)

    drive = recorded(tmp_path, work)
    assert drive.cut(Cut()) == {"a": b"o" * 100}
    seen = {drive.cut(how)["a"] for how in DRAWN}
    assert {b"o" * 64 + b"n" * 36, b"n" * 64 + b"\0" * 36} <= seen


def test_kept_transactions_end_at_or_after_the_last_sync(tmp_path: Path) -> None:
    """The second is synced and implies the first. Of the third and fourth none, the third, or both are kept."""
    recorder = Recorder(tmp_path)
    with recorder.recording():
        (tmp_path / LEDGER).touch()
        sync(tmp_path)
    *_, drive = after_each(recorder.record)
    for image, synced in ((b"1", False), (b"2", True), (b"3", False), (b"4", False)):
        drive.apply(Committed(image, synced))
    assert drive.cut(Cut()) == {LEDGER: b"2"}
    assert {drive.cut(how)[LEDGER] for how in DRAWN} == {b"2", b"3", b"4"}


def test_all_operations_are_recorded(tmp_path: Path) -> None:
    """A complete replay of the record is the folder, with replaced files, removed trees and files of other programs."""

    def work(folder: Path) -> None:
        (folder / "x").mkdir()
        for name in ("a", "b", "x/c"):
            (folder / name).write_text(name)
        (folder / "a").replace(folder / "b")
        subprocess.run(["sh", "-c", "echo else > other"], cwd=folder, check=True)
        shutil.rmtree(folder / "x")
        descriptor = os.open(folder / "p", os.O_RDWR | os.O_CREAT)
        os.ftruncate(descriptor, 9)
        os.pwrite(descriptor, b"end", 6)
        os.close(descriptor)

    found = {"b": b"a", "other": b"else\n", "p": b"\0\0\0\0\0\0end"}
    assert recorded(tmp_path, work).cut(ALL) == found
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == found


WRITER = """
import os, sys
from pathlib import Path
from fl_server.store.database.store import open_sqlite
from tests.fl_server.store.records import a_client, a_run, why
store = open_sqlite(Path(sys.argv[1]))
writes = {"client": lambda: store.put_clients([a_client()]), "run": lambda: store.create_run(a_run(), why())}
for name, write in writes.items():
    os.write(2, b"now " + name.encode())
    write()
os.write(2, b"now over")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_transaction_recorded_as_synced_is_synced(tmp_path: Path) -> None:
    """SQLite syncs its log for a transaction with synchronous=FULL, and for no other."""
    command = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync,write", "-o", str(tmp_path / "calls"), sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    traced = subprocess.run(
        [*command, "-c", WRITER, str(tmp_path / LEDGER)], env=environment, capture_output=True, text=True, check=False
    )
    if "ptrace" in traced.stderr:
        pytest.skip(f"strace is not permitted: {traced.stderr.strip()}")
    calls = (tmp_path / "calls").read_text()
    syncs = [part.count("sync(") for part in re.split("now (?:client|run|over)", calls)[1:3]]
    assert (syncs, traced.returncode) == ([0, 1], 0), calls[-2000:]
