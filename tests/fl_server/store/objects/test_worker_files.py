"""Parts of uploads that workers put into the object store: continued at another worker, counted or removed."""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path

import pytest
from blake3 import blake3

from fl_server.store.database.store import open_sqlite
from fl_server.store.database.transactions import Home
from fl_server.store.ledger import Ledger
from fl_server.store.objects import files as files_module
from fl_server.store.objects.bucket import Bucket
from fl_server.store.objects.files import StoredFiles
from fl_server.store.objects.local_cache import LocalCache
from fl_server.store.spool.part_file import PartFile, StoredUpdate
from fl_server.store.spool.spool import Spool, SpoolKey
from fl_server.worker.upload import WorkerFiles

PART = 64
DATA = bytes(range(256)) + b"the end"
DIGEST = blake3(DATA).digest()
KEY = SpoolKey("r1", 12, 0, "device-7")


class Site:
    """A coordinator, and workers on machines of their own."""

    def __init__(self, bucket: Bucket, folder: Path) -> None:
        self.bucket, self.folder = bucket, folder
        folder.joinpath("coordinator").mkdir()
        self.ledger = Ledger(open_sqlite(folder / "ledger.sqlite", home=Home("", storage=bucket.url)))
        cache = LocalCache(1 << 20)
        self.files = StoredFiles(bucket, self.ledger, folder / "coordinator", cache, shared=True)
        self.spool = Spool(folder / "coordinator" / "spool", files=self.files)
        self.name = self.files.name(self.spool.path(KEY, DIGEST))

    def worker(self, name: str) -> tuple[WorkerFiles, PartFile]:
        """A worker that opens the upload with the parts that the coordinator lets it use."""
        state = self.folder / name
        files = WorkerFiles(self.bucket, self.ledger.store.coordinator_id, state, LocalCache(1 << 20))
        files.part_bytes = PART
        self.files.learn(self.name)
        files.give(self.name, self.files.to_continue(self.name))
        return files, Spool(state / "spool", files=files).open_part(KEY, DIGEST, len(DATA))

    def objects(self) -> list[str]:
        """Keys of the updates' objects."""
        return [key for key, _ in self.bucket.keys(self.ledger.store.coordinator_id) if "/spool/" in key]


@pytest.fixture
def site(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A coordinator with small parts."""
    monkeypatch.setattr(files_module, "PART_BYTES", PART)
    return Site(bucket, tmp_path)


def half_sent(site: Site) -> None:
    """A worker puts two parts and is gone."""
    files, part = site.worker("first")
    part.write(0, DATA[: 2 * PART + 10])
    wait(part.sending)
    files.close()


def test_an_upload_continues_at_another_worker(site: Site) -> None:
    """It has the whole parts that the first one put, and the update that counts is read by ranges."""
    half_sent(site)
    files, part = site.worker("second")
    assert part.kept_bytes == 2 * PART
    part.write(2 * PART, DATA[2 * PART :])
    part.seal()
    stored = files.take(site.name)
    assert stored is not None
    assert site.files.find(site.name) is None
    site.files.count([stored])
    source = site.spool.source(KEY, DIGEST)
    assert isinstance(source, StoredUpdate)
    assert (source.read(0, 1000), source.read(100, 60)) == (DATA, DATA[100:160])
    assert site.spool.is_whole(KEY, DIGEST)


def test_an_update_that_counts_without_a_verdict_is_sent_again(site: Site) -> None:
    """Its coordinator was killed between the two writes. Another worker has all of it, and no part is removed."""
    files, part = site.worker("first")
    part.write(0, DATA)
    part.seal()
    stored = files.take(site.name)
    assert stored is not None
    site.files.count([stored])
    files, part = site.worker("second")
    assert part.kept_bytes == site.files.kept(site.name) == len(DATA)
    part.seal()
    again = files.take(site.name)
    assert again == stored
    site.files.count([again])
    site.files.remove_objects()
    assert site.spool.is_whole(KEY, DIGEST)
    assert len(site.objects()) == len(stored.parts)


def test_parts_whose_removal_is_written_are_not_used(site: Site) -> None:
    """They may be gone at any moment: the next upload of the same bytes begins anew, and keeps its own parts."""
    half_sent(site)
    site.files.learn(site.name)
    site.files.remove_file(site.name)
    files, part = site.worker("second")
    assert part.kept_bytes == 0
    part.write(0, DATA)
    part.seal()
    stored = files.take(site.name)
    assert stored is not None
    site.files.count([stored])
    site.files.remove_objects()
    assert site.spool.is_whole(KEY, DIGEST)
    assert len(site.objects()) == len(stored.parts)


def test_the_end_of_a_round_removes_what_workers_have_put(site: Site) -> None:
    """Also the parts of uploads that were never completed."""
    half_sent(site)
    site.spool.remove_round("r1", 12)
    site.files.remove_objects()
    assert site.objects() == []
