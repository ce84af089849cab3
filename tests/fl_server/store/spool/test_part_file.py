"""Reading whole updates."""

from pathlib import Path

import pytest

from fl_server.store.errors import StoreError
from fl_server.store.spool.part_file import UpdateFile

DATA = bytes(range(256)) * 4


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
