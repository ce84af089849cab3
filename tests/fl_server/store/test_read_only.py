"""A ledger that is looked at while a coordinator writes it."""

from __future__ import annotations

import pytest

from fl_server.store.base import HistoryRecord, StoreError
from fl_server.store.sql import open_read_only, open_sqlite

LINE = HistoryRecord(1.0, "coordinator", "round_committed", "run", "round 0")


def test_what_is_written_is_seen_and_nothing_can_be_changed(tmp_path):
    """A reader sees each transaction once it is over; a write through it is an error, and leaves no trace."""
    path = tmp_path / "ledger.sqlite"
    ledger, reader = open_sqlite(path), open_read_only(path)
    ledger.add_history(LINE)
    with pytest.raises(StoreError, match="readonly"):
        reader.add_history(LINE)
    assert reader.history() == ledger.history() == [LINE]
    assert reader.coordinator_id == ledger.coordinator_id
    ledger.close()
    reader.close()


def test_a_ledger_that_nobody_has_open(tmp_path):
    """After its coordinator has ended it can be read too."""
    path = tmp_path / "odd name?#%.sqlite"
    ledger = open_sqlite(path)
    ledger.add_history(LINE)
    ledger.close()
    reader = open_read_only(path)
    assert reader.history() == [LINE]
    reader.close()


def test_no_ledger(tmp_path):
    """A file that is not there is not made."""
    with pytest.raises(StoreError, match="there is no ledger"):
        open_read_only(tmp_path / "ledger.sqlite")
    assert not list(tmp_path.iterdir())
