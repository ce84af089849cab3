"""The files of one update: reading whole ones, and who may write one under way."""

from pathlib import Path

import pytest

from fl_server.store.errors import StoreError
from fl_server.store.spool.kept_files import PartPaths
from fl_server.store.spool.part_file import PartBusy, UpdateFile
from fl_server.store.spool.spool import Spool, SpoolKey

DATA = bytes(range(256)) * 4
KEY = SpoolKey("r1", 12, 0, "device-7")
DIGEST, OTHER = b"\xab" * 32, b"\xcd" * 32


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """An empty spool."""
    return Spool(tmp_path / "spool")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An update of DATA."""
    path = tmp_path / "update"
    path.write_bytes(DATA)
    return path


def test_blocks_are_read_into_the_callers_memory(path: Path) -> None:
    """From any offset."""
    block = bytearray(10)
    with UpdateFile(path) as update:
        update.read_into(300, memoryview(block))
        assert (bytes(block), update.size_bytes) == (DATA[300:310], 1024)


def test_reading_past_the_end_is_an_error(path: Path) -> None:
    """A short file is reported, and never padded."""
    with UpdateFile(path) as update, pytest.raises(StoreError, match="ends at 1024, 6 bytes short"):
        update.read_into(1020, bytearray(10))


def test_a_missing_update_is_an_error(path: Path) -> None:
    """The message names it."""
    path.unlink()
    with pytest.raises(StoreError, match="could not open the update"):
        UpdateFile(path)


def test_a_discarded_upload_has_its_writer_until_its_files_are_gone(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that opens the update in between would lose its own file."""
    part, remove, asked = spool.open_part(KEY, DIGEST, len(DATA)), PartPaths.remove_part, []

    def removing(paths: PartPaths) -> None:
        with pytest.raises(PartBusy, match="close that one first"):
            spool.open_part(KEY, OTHER, len(DATA))
        asked.append(paths)
        remove(paths)

    monkeypatch.setattr(PartPaths, "remove_part", removing)
    part.discard()
    assert len(asked) == 1
    spool.open_part(KEY, OTHER, len(DATA)).close()


@pytest.mark.parametrize("end", ["seal", "close"])
def test_a_late_discard_leaves_the_file_of_the_next_writer(spool: Spool, end: str) -> None:
    """The first stream has ended already when it learns that its update does not count."""
    part = spool.open_part(KEY, DIGEST, len(DATA))
    part.write(0, DATA)
    getattr(part, end)()
    following = spool.open_part(KEY, OTHER, len(DATA))
    following.write(0, DATA)
    part.discard()
    assert following.path.read_bytes() == DATA
    following.close()
