"""What a drive keeps, worked by hand; and that the recorder hears all that is done."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.power.drives import ALL, Cut, Drive, Rest, after_each
from tests.power.recorder import LEDGER, Ended, Recorder

ROOT = Path(__file__).parents[2]
DRAWN = [Cut(Rest.DRAWN, Rest.DRAWN, Rest.DRAWN, seed) for seed in range(64)]


def recorded(folder: Path, work: Callable[[Path], None]) -> Drive:
    """The drive at the end of the work."""
    recorder = Recorder(folder)
    with recorder.recording():
        work(folder)
    *_, drive = after_each(recorder.record)
    return drive


def sync(path: Path) -> None:
    """As the product does."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def test_a_file_that_is_synced_and_its_name_too_is_there(tmp_path):
    """Whatever else is lost."""

    def work(folder):
        (folder / "a").write_bytes(b"content")
        sync(folder / "a")
        sync(folder)
        (folder / "b").write_bytes(b"lost")

    assert recorded(tmp_path, work).cut(Cut()) == {"a": b"content"}


def test_a_name_without_a_sync_of_its_content_is_an_empty_file(tmp_path):
    """The order of a rename and of the content before it is no promise."""

    def work(folder):
        (folder / "part").write_bytes(b"content")
        (folder / "part").rename(folder / "whole")

    drive = recorded(tmp_path, work)
    assert drive.cut(Cut()) == {}
    assert drive.cut(Cut(names=Rest.KEPT)) == {"whole": b""}
    assert drive.cut(ALL) == {"whole": b"content"}


def test_content_without_a_sync_of_its_name_has_the_old_name(tmp_path):
    """A rename comes back whole or not at all: both names are never there."""

    def work(folder):
        (folder / "part").write_bytes(b"content")
        sync(folder / "part")
        sync(folder)
        (folder / "part").rename(folder / "whole")

    drive = recorded(tmp_path, work)
    assert drive.cut(Cut()) == {"part": b"content"}
    assert {tuple(drive.cut(how)) for how in DRAWN} == {("part",), ("whole",)}


def test_what_is_below_a_folder_goes_with_the_folder_s_name(tmp_path):
    """Syncing a folder does not sync its own name."""

    def work(folder):
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_bytes(b"content")
        sync(folder / "inner" / "a")
        sync(folder / "inner")

    drive = recorded(tmp_path, work)
    assert drive.cut(Cut()) == {}
    assert drive.cut(Cut(names=Rest.KEPT)) == {"inner": None, "inner/a": b"content"}


def test_content_that_is_written_over_is_torn(tmp_path):
    """Blocks of 64 bytes are old, new or zero."""

    def work(folder):
        for letter in (b"o", b"n"):
            (folder / "a").write_bytes(letter * 100)
            if letter == b"o":
                sync(folder / "a")
                sync(folder)

    drive = recorded(tmp_path, work)
    assert drive.cut(Cut()) == {"a": b"o" * 100}
    seen = {drive.cut(how)["a"] for how in DRAWN}
    assert {b"o" * 64 + b"n" * 36, b"n" * 64 + b"\0" * 36} <= seen


def test_transactions_come_back_up_to_one_of_those_after_the_last_sync(tmp_path):
    """The second is synced and carries the first; of the third and fourth none, the third, or both are there."""
    recorder = Recorder(tmp_path)
    with recorder.recording():
        (tmp_path / LEDGER).touch()
        sync(tmp_path)
    *_, drive = after_each(recorder.record)
    for image, synced in ((b"1", False), (b"2", True), (b"3", False), (b"4", False)):
        drive.hear(Ended(image, synced))
    assert drive.cut(Cut()) == {LEDGER: b"2"}
    assert {drive.cut(how)[LEDGER] for how in DRAWN} == {b"2", b"3", b"4"}


def test_all_that_is_done_is_heard(tmp_path):
    """A record that is replayed whole is the folder: renames over files, removed trees, files that others write."""

    def work(folder):
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
from fl_server.store.sql import open_sqlite
from tests.fl_server.store.records import a_client, a_run, why
store = open_sqlite(Path(sys.argv[1]))
writes = {"client": lambda: store.put_clients([a_client()]), "run": lambda: store.create_run(a_run(), why())}
for name, write in writes.items():
    os.write(2, b"now " + name.encode())
    write()
os.write(2, b"now over")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here, which shows what SQLite asks of the system")
def test_a_transaction_that_is_taken_for_synced_is(tmp_path):
    """The system is asked to sync SQLite's log for a transaction with synchronous=FULL, and for no other."""
    command = ["strace", "-f", "-y", "-e", "trace=fsync,fdatasync,write", "-o", str(tmp_path / "calls"), sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    traced = subprocess.run(
        [*command, "-c", WRITER, str(tmp_path / LEDGER)], env=environment, capture_output=True, text=True, check=False
    )
    if "ptrace" in traced.stderr:
        pytest.skip(f"strace is not allowed to: {traced.stderr.strip()}")
    calls = (tmp_path / "calls").read_text()
    syncs = [part.count("sync(") for part in re.split("now (?:client|run|over)", calls)[1:3]]
    assert (syncs, traced.returncode) == ([0, 1], 0), calls[-2000:]
