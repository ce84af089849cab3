"""Reading a ledger while a coordinator writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fl_server.store.database.store import LEDGER, open_read_only, open_sqlite
from fl_server.store.errors import StoreError
from fl_server.store.records import HistoryRecord

ENTRY = HistoryRecord(1.0, "coordinator", "round_committed", "run", "round 0")


def test_a_reader_sees_every_write_and_changes_nothing(tmp_path: Path) -> None:
    """A reader sees each committed transaction. A write through it is an error and changes nothing."""
    ledger, reader = open_sqlite(tmp_path / LEDGER), open_read_only(tmp_path)
    ledger.add_history(ENTRY)
    with pytest.raises(StoreError, match="readonly"):
        reader.add_history(ENTRY)
    assert reader.history() == ledger.history() == [ENTRY]
    assert reader.coordinator_id == ledger.coordinator_id
    ledger.close()
    reader.close()


def test_a_closed_ledger_can_be_read(tmp_path: Path) -> None:
    """Also after its coordinator has ended."""
    folder = tmp_path / "odd name?#%"
    folder.mkdir()
    ledger = open_sqlite(folder / LEDGER)
    ledger.add_history(ENTRY)
    ledger.close()
    reader = open_read_only(folder)
    assert reader.history() == [ENTRY]
    reader.close()


def test_a_missing_ledger_is_an_error(tmp_path: Path) -> None:
    """The file is not created."""
    with pytest.raises(StoreError, match="there is no ledger"):
        open_read_only(tmp_path)
    assert not list(tmp_path.iterdir())
