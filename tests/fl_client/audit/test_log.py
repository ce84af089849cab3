"""The daemon's audit log beside its work: nothing waits for it, and nothing is left out without a number."""

from __future__ import annotations

import errno
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from prometheus_client import CollectorRegistry, Counter

from fl_client.audit import log as log_module
from fl_client.audit.file import AuditFile, Entry, rows_in
from fl_client.audit.log import LEFT_OUT, DeviceAudit, note_certificate, note_registered
from protos.fl.v1 import coordinator_pb2 as pb
from tests.processes.certificates import Pki


class Site:
    """A log in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        counter = Counter("rows", "Rows.", ["outcome"], registry=CollectorRegistry())
        self.count = counter.labels
        self.log = DeviceAudit(folder, counter, "fl.example.org:7070")

    async def rows(self) -> list[tuple[str, str]]:
        """Method and detail of all rows, when all are written."""
        await self.log.close()
        return [(row.method, row.detail) for row in rows_in(self.folder)]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """An empty log."""
    site = Site(tmp_path)
    yield site
    site.log._thread.shutdown()


async def test_rows_are_written_in_order(site: Site) -> None:
    """Each with the coordinator that asked and its address."""
    site.log.note("assigned", "r/3/0")
    site.log.coordinator = "coordinator:c1"
    site.log.note("trained", "r/3/0", detail="80 examples, 5 steps")
    assert await site.rows() == [("assigned", ""), ("trained", "80 examples, 5 steps")]
    assert [(row.actor, row.address, row.subject) for row in rows_in(site.folder)] == [
        ("coordinator", "fl.example.org:7070", "r/3/0"), ("coordinator:c1", "fl.example.org:7070", "r/3/0"),
    ]  # fmt: skip


async def test_a_slow_disk_is_not_waited_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop goes on, and the rows follow."""
    go_on, append = threading.Event(), AuditFile.append

    def slow(self: AuditFile, rows: Sequence[Entry]) -> None:
        go_on.wait(60)
        append(self, rows)

    monkeypatch.setattr(AuditFile, "append", slow)
    for number in range(5):
        site.log.note(str(number))
    assert list(rows_in(site.folder)) == []
    go_on.set()
    assert [method for method, _ in await site.rows()] == ["0", "1", "2", "3", "4"]


async def test_a_full_disk_keeps_rows_and_counts_further_ones(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """When there is room again, the rows are written with the number of the others."""
    append, full = AuditFile.append, [True]

    def fail(self: AuditFile, rows: Sequence[Entry]) -> None:
        if full:
            raise OSError(errno.ENOSPC, "no space")
        append(self, rows)

    monkeypatch.setattr(AuditFile, "append", fail)
    monkeypatch.setattr(log_module, "MOST_WAITING", 3)
    for number in range(5):
        site.log.note(str(number))
        site.log._thread.submit(lambda: None).result()
    full.clear()
    found = await site.rows()
    assert found == [("0", ""), ("1", ""), ("2", ""), (LEFT_OUT, "2")]
    assert site.count("left_out")._value.get() == 2


async def test_a_flood_of_rows_is_limited(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile coordinator cannot push older rows out of the files within minutes."""
    monkeypatch.setattr(log_module, "MOST_WAITING", 10_000)
    for _ in range(log_module.ROW_BURST + 500):
        site.log.note("assigned")
    found = await site.rows()
    methods = [method for method, _ in found]
    assert methods.count("assigned") <= log_module.ROW_BURST + 50
    assert methods.count("assigned") + sum(int(detail) for method, detail in found if method == LEFT_OUT) >= (
        log_module.ROW_BURST + 500
    )


async def test_a_registration_has_the_coordinator_and_its_authority(site: Site, tmp_path: Path) -> None:
    """The fingerprint is that of `openssl x509 -fingerprint -sha256`, and later rows name the coordinator."""
    pki = Pki(tmp_path / "pki")
    note_registered(site.log, pb.RegisterResponse(coordinator_id="c1", protocol=1), pki.ca.read_bytes())
    note_registered(site.log, pb.RegisterResponse(coordinator_id="c1", protocol=1), b"")
    fingerprint = pki.authority.certificate.fingerprint(hashes.SHA256()).hex()
    assert await site.rows() == [
        ("registered", f"protocol 1, CA {fingerprint}"), ("registered", "protocol 1, CA none, in plain text"),
    ]  # fmt: skip
    assert {row.actor for row in rows_in(site.folder)} == {"coordinator:c1"}


async def test_another_certificate_is_noted_once(site: Site, tmp_path: Path) -> None:
    """At the first connection, and after a renewal."""
    pki = Pki(tmp_path / "pki")
    first, second = pki.issue("client", "a").cert.read_bytes(), pki.issue("client", "b").cert.read_bytes()
    for pem in (first, first, second, b"no certificate", second):
        note_certificate(site.log, pem)
    assert [method for method, _ in await site.rows()] == ["certificate_used"] * 3
    serials = [f"{x509.load_pem_x509_certificate(pem).serial_number:x}" for pem in (first, second, second)]
    assert [row.subject for row in rows_in(site.folder)] == serials
