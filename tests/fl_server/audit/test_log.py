"""What reads and refusals may cost: repeats are counted, and nothing is left out without a row that names it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fl_common.audit import AuditRow
from fl_server.audit import log as log_module
from fl_server.audit.log import READS, REFUSALS, AuditLog, AuditRecord
from fl_server.metrics import Metrics
from fl_server.store.database.store import open_sqlite
from fl_server.store.ledger import Ledger
from tests.fl_server.harness import ledger_file, until

READ = AuditRecord("viewer:bob", "192.0.2.7:5000", "GetRun", "digits-1", "ok")
REFUSAL = AuditRecord("anybody", "192.0.2.9:6000", "Register", "", "permission_denied", "no fl:// name")


class Site:
    """An audit log over its ledger."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(open_sqlite(ledger_file(folder)))
        metrics = Metrics(CollectorRegistry())
        self.log = AuditLog(self.ledger, folder, 10, metrics.audit_rows)

    async def rows(self) -> list[AuditRow]:
        """All rows, once everything that was counted has a row."""
        await self.log.close()
        return (await self.ledger.do(self.ledger.store.audit_rows, 1, 10**6, 5000, {})).rows


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """An empty log."""
    site = Site(tmp_path)
    yield site
    site.ledger.close()


async def test_repeated_reads_are_one_row_and_a_count(site: Site) -> None:
    """A monitor that polls every second, from a new port each time."""
    for port in range(60):
        site.log.record_read(replace(READ, address=f"192.0.2.7:{port}"))
    site.log.record_read(replace(READ, subject="digits-2"))
    site.log.record_read(replace(READ, result="not_found"))
    site.log.record_read(replace(READ, actor="viewer:eve"))
    found = [(row.actor, row.subject, row.result, row.detail) for row in await site.rows()]
    assert found == [
        ("viewer:bob", "digits-1", "ok", ""),
        ("viewer:bob", "digits-2", "ok", ""),
        ("viewer:bob", "digits-1", "not_found", ""),
        ("viewer:eve", "digits-1", "ok", ""),
        ("viewer:bob", "digits-1", "ok", "59 times more within a minute"),
    ]


async def test_reads_of_many_subjects_are_limited(site: Site) -> None:
    """A viewer cannot fill the ledger with subjects that do not exist."""
    for number in range(READS + 40):
        site.log.record_read(replace(READ, subject=f"r{number}"))
    rows = await site.rows()
    assert len(rows) == READS + 1
    assert rows[-1].detail == "40 times more within a minute"


async def test_refusals_of_one_caller_are_limited(site: Site) -> None:
    """Ten a minute, and a count; another caller has its own."""
    for port in range(50):
        site.log.record_refusal(replace(REFUSAL, address=f"192.0.2.9:{port}"))
    site.log.record_refusal(replace(REFUSAL, address="192.0.2.8:1"))
    rows = await site.rows()
    assert Counter(row.address.partition(":")[0] for row in rows) == {"192.0.2.9": 11, "192.0.2.8": 1}
    assert rows[-1].detail == "40 times more within a minute, the last one: no fl:// name"


async def test_refusals_of_many_addresses_are_limited(site: Site) -> None:
    """A botnet cannot fill the ledger."""
    for number in range(REFUSALS + 900):
        site.log.record_refusal(replace(REFUSAL, address=f"10.0.{number // 250}.{number % 250}:1"))
    rows = await site.rows()
    assert len(rows) == REFUSALS + 1
    assert rows[-1].detail.startswith("900 times more within a minute")


async def test_a_count_is_written_when_its_minute_is_over(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another call."""
    monkeypatch.setattr(log_module, "WINDOW_S", 0.2)
    log = AuditLog(site.ledger, Path("/nowhere"), 10, Metrics(CollectorRegistry()).audit_rows)
    for _ in range(3):
        log.record_read(READ)

    def newest() -> str:
        rows = site.ledger.store.newest_audit_rows(1)
        return rows[0].detail if rows else ""

    await until(lambda: newest() == "2 times more within a minute", "the count is written")
    await log.close()
