"""The end of the chain: durable rows, groups, a full disk, lost connections, and an end that somebody changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import text
from structlog.testing import capture_logs

from fl_common.audit import AuditRow, ChainCheck, Head
from fl_server.audit import log as writer_module
from fl_server.audit.log import ALTERED, HEAD_FILE, HEAD_MISSING, AuditRecord, AuditWriter
from fl_server.metrics import Metrics
from fl_server.store.database.store import open_sqlite
from fl_server.store.errors import StoreFull, StoreTakenOver, StoreUnavailable
from fl_server.store.ledger import Ledger
from tests.fl_server.harness import ledger_file, until

BAN = AuditRecord("operator:alice", "192.0.2.7:5000", "BanClient", "edge-3", "ok", "lost device")
NOBODY_WAITS = AuditRecord("operator:alice", "192.0.2.7:5000", "ListRuns", "", "ok")


class Site:
    """A ledger in a folder, with a writer that can be replaced as by a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metrics = Metrics(CollectorRegistry())
        self._open()

    def restart(self) -> AuditWriter:
        """Another coordinator on the same files. The one before gets no chance to write anything."""
        self.ledger.close()
        self._open()
        return self.writer

    def _open(self) -> None:
        self.ledger = Ledger(open_sqlite(ledger_file(self.folder)))
        self.writer = AuditWriter(self.ledger, self.folder, self.metrics.audit_rows)

    @property
    def rows(self) -> list[AuditRow]:
        """All rows of the ledger."""
        return self.ledger.store.audit_rows(-(2**63), 2**63 - 1, 5000, {}).rows

    def edit(self, statement: str) -> None:
        """Change the ledger behind its writer's back."""
        store: Any = self.ledger.store
        with store._engine.begin() as db:
            db.execute(text(statement))

    def counted(self, outcome: str) -> float:
        """The metric."""
        return self.metrics.registry.get_sample_value("fl_audit_rows_total", {"outcome": outcome}) or 0.0

    def check(self) -> None:
        """The chain is whole."""
        check = ChainCheck()
        for row in self.rows:
            check.add(row)
        assert check.end() == []

    def fail_writes(
        self, monkeypatch: pytest.MonkeyPatch, error: Exception, *, written: bool = False
    ) -> Callable[[], None]:
        """From now on writes fail, after they are done if `written`. Returns what ends that."""
        store: Any = self.ledger.store
        write, failing = store.add_audit_rows, [True]

        def add(rows: Sequence[AuditRow], after: Head, *, fsynced: bool) -> Head:
            if not failing or written:
                result: Head = write(rows, after, fsynced=fsynced)
            if failing:
                raise error
            return result

        monkeypatch.setattr(store, "add_audit_rows", add)
        return failing.clear


@pytest.fixture
async def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    """An empty ledger; attempts to write follow one another at once."""
    monkeypatch.setattr(writer_module, "RETRY_S", 0.01)
    site = Site(tmp_path)
    yield site
    await site.writer.close()
    site.ledger.close()


async def test_a_row_is_in_the_ledger_when_it_is_added(site: Site) -> None:
    """With what was given, its number, and a time in whole microseconds."""
    assert [await site.writer.add(BAN), await site.writer.add(BAN)] == [1, 2]
    [first, _] = site.rows
    assert (first.number, first.actor, first.subject, first.detail) == (1, "operator:alice", "edge-3", "lost device")
    assert first.time_us > 1_700_000_000_000_000
    site.check()
    assert site.counted("written") == 2


async def test_rows_at_once_share_transactions(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load the number of transactions is small, and the order is that of the calls."""
    store: Any = site.ledger.store
    sizes: list[int] = []
    write = store.add_audit_rows

    def add(rows: Sequence[AuditRow], after: Head, *, fsynced: bool) -> Head:
        sizes.append(len(rows))
        result: Head = write(rows, after, fsynced=fsynced)
        return result

    monkeypatch.setattr(store, "add_audit_rows", add)
    assert await asyncio.gather(*(site.writer.add(BAN) for _ in range(700))) == list(range(1, 701))
    assert sum(sizes) == 700
    assert len(sizes) <= 4
    assert max(sizes) <= writer_module.MOST_ROWS
    site.check()


async def test_a_restart_continues_the_chain(site: Site) -> None:
    """The number and the hash come from the ledger."""
    await site.writer.add(BAN)
    await site.restart().start()
    assert await site.writer.add(BAN) == 2
    site.check()
    assert site.counted("altered") == 0


async def test_a_row_waits_for_a_full_disk(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its caller must know: then nothing is written of it, also not later."""
    end = site.fail_writes(monkeypatch, StoreFull("no space"))
    waiting = asyncio.create_task(site.writer.add(BAN))
    with pytest.raises(StoreFull):
        await site.writer.add(BAN, at_once=True)
    with pytest.raises(StoreFull):
        await site.writer.add(BAN, at_once=True)
    site.writer.add_later(NOBODY_WAITS)
    assert not waiting.done()
    end()
    assert await waiting == 1
    await until(lambda: len(site.rows) == 2, "all rows are written")
    assert [row.method for row in site.rows] == ["BanClient", "ListRuns"]
    assert await site.writer.add(BAN, at_once=True) == 3
    site.check()


async def test_a_row_whose_caller_has_left_is_written(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled call may have changed something."""
    end = site.fail_writes(monkeypatch, StoreFull("no space"))
    waiting = asyncio.create_task(site.writer.add(BAN))
    await asyncio.sleep(0)
    waiting.cancel()
    end()
    await until(lambda: len(site.rows) == 1, "all rows are written")


async def test_rows_are_written_once_after_a_lost_connection(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection was lost after the commit: the result was unknown, and the rows are in the ledger."""
    end = site.fail_writes(monkeypatch, StoreUnavailable("lost"), written=True)
    waiting = [asyncio.create_task(site.writer.add(BAN)) for _ in range(3)]
    with pytest.raises(StoreUnavailable):
        await site.writer.add(BAN, at_once=True)
    end()
    assert await asyncio.gather(*waiting) == [2, 3, 4]
    assert await site.writer.add(BAN) == len(site.rows)
    site.check()
    assert site.counted("altered") == 0
    assert ALTERED not in {row.method for row in site.rows}


async def test_an_error_reaches_all_that_wait(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another coordinator has the ledger: nobody waits for ever."""
    site.fail_writes(monkeypatch, StoreTakenOver("gone"))
    found = await asyncio.gather(*(site.writer.add(BAN) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in found] == [StoreTakenOver] * 3


async def test_a_ledger_that_stays_away_fills_no_memory(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that nobody waits for are left out beyond a limit, and counted."""
    monkeypatch.setattr(writer_module, "MOST_WAITING", 5)
    end = site.fail_writes(monkeypatch, StoreFull("no space"))
    for _ in range(8):
        site.writer.add_later(NOBODY_WAITS)
    assert site.counted("left_out") == 3
    end()
    await until(lambda: len(site.rows) == 5, "all rows are written")


CHANGES = {
    "newest removed": ("DELETE FROM audit WHERE number = 3", "row 3 is missing at the end"),
    "more removed": ("DELETE FROM audit WHERE number > 1", "rows 2 to 3 are missing at the end"),
    "all removed": ("DELETE FROM audit", "rows 1 to 3 are missing at the end"),
    "newest changed": ("UPDATE audit SET subject = 'x' WHERE number = 3", "row 3 does not match its hash"),
    "gap before the newest": ("DELETE FROM audit WHERE number = 2", "row 2 is missing"),
    "inserted before the first": ("UPDATE audit SET number = -7 WHERE number = 1", "row -7 was inserted"),
}


@pytest.mark.parametrize(("statement", "problem"), CHANGES.values(), ids=CHANGES)
async def test_a_start_finds_a_changed_end(site: Site, statement: str, problem: str) -> None:
    """It is logged, counted and recorded, and the chain goes on."""
    for _ in range(3):
        await site.writer.add(BAN)
    site.edit(statement)
    with capture_logs() as logs:
        await site.restart().start()
        await site.writer.add(BAN)
    assert [each["event"] for each in logs if each["log_level"] == "error"] == ["audit_altered"]
    [row] = [row for row in site.rows if row.method == ALTERED]
    assert problem in row.detail
    assert site.counted("altered") == 1


async def test_a_replaced_chain_is_found_at_the_start(site: Site) -> None:
    """The ledger of another day: as many rows, with other hashes."""
    await site.writer.add(BAN)
    (site.folder / HEAD_FILE).write_text(f"{Head(1, bytes(32))}\n")
    await site.restart().start()
    await site.writer.add(BAN)
    assert "row 1 is not the one that was written" in next(row for row in site.rows if row.method == ALTERED).detail


async def test_an_end_that_changes_while_the_coordinator_runs_is_found(site: Site) -> None:
    """With the next row, which is behind the row that records it."""
    for _ in range(3):
        await site.writer.add(BAN)
    site.edit("DELETE FROM audit WHERE number = 3")
    assert await site.writer.add(BAN) == 4
    assert [row.method for row in site.rows] == ["BanClient", "BanClient", ALTERED, "BanClient"]
    assert "expected 3:" in site.rows[2].detail
    site.check()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff\xfe", b"5:ab", None])
async def test_a_missing_file_of_the_head_is_reported_and_no_alarm(site: Site, content: bytes | None) -> None:
    """A power cut may have cut it. It is logged, recorded, and written again at once."""
    await site.writer.add(BAN)
    file = site.folder / HEAD_FILE
    file.unlink() if content is None else file.write_bytes(content)
    with capture_logs() as logs:
        await site.restart().start()
    assert [each["event"] for each in logs] == ["audit_head_missing", "audit_head"]
    assert file.read_text() == f"{site.rows[0].head}\n"
    await site.writer.add(BAN)
    assert [row.method for row in site.rows] == ["BanClient", HEAD_MISSING, "BanClient"]
    assert (site.folder / HEAD_FILE).read_text() == f"{site.rows[-1].head}\n"
    assert site.counted("altered") == 0


async def test_the_file_has_durable_rows_only(site: Site) -> None:
    """A row without an fsync may be gone after a power cut, which is no alarm."""
    await site.writer.add(BAN)
    site.writer.add_later(NOBODY_WAITS)
    await until(lambda: len(site.rows) == 2, "all rows are written")
    assert (site.folder / HEAD_FILE).read_text().startswith("1:")
