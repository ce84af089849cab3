"""Limits of one client at the coordinator's own calls: streams, queries, fetches, unfinished uploads, messages."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from fl_server.clients import sessions, transfer_limits
from fl_server.errors import InvalidInput, LimitExceeded, NotNow, UnknownSessionError
from fl_server.store.spool.spool import Spool, SpoolKey, TooManyUnfinished, UnfinishedLimit
from protos.codec import digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.client_evaluation import WITH_CLIENT_EVALUATION
from tests.fl_server.devices import NO_CONTEXT, Device, stream, upload
from tests.fl_server.harness import TASK, World, until
from tests.fl_server.upload_setup import upload_setup


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals are not delayed."""
    monkeypatch.setattr(transfer_limits, "REFUSAL_DELAY_S", 0.0)


async def test_an_upload_without_a_header_is_ended(tmp_path: Path) -> None:
    """Its client is unknown, and nothing of it is kept."""
    async with World(tmp_path, stall_s=0.01) as world:
        with pytest.raises(NotNow, match=r"no header of an upload came in 0.01 s; try again in 1 s"):
            await world.service.SubmitUpdate(stream(hangs=True), NO_CONTEXT)


async def test_the_uploads_of_a_client_at_once_are_limited(tmp_path: Path) -> None:
    """One more is refused before a file is opened for it; after one ends, the next is accepted."""
    async with upload_setup(tmp_path, transfers={"uploads_at_once": 1}) as bench:
        older = asyncio.create_task(bench.submit(*bench.parts()[:2], hangs=True))
        await until(lambda: bench.run.rounds.bytes.up, "a chunk has arrived")
        with pytest.raises(LimitExceeded, match="1 uploads at once"):
            await bench.send()
        older.cancel()
        await asyncio.gather(older, return_exceptions=True)
        assert (await bench.send(start=100)).admitted


async def test_the_unread_downloads_of_a_client_are_limited(tmp_path: Path) -> None:
    """Another client's downloads continue."""
    async with upload_setup(tmp_path, transfers={"downloads_at_once": 2}) as bench:
        digest = bench.assignment.resources[0].digest

        def reading(device: Device) -> Any:
            return aiter(
                bench.world.service.FetchModel(
                    pb.FetchModelRequest(session_id=device.session, digest=digest), NO_CONTEXT
                )
            )

        unread = [reading(bench.a) for _ in range(2)]
        for each in unread:
            await anext(each)
        with pytest.raises(LimitExceeded, match="2 downloads at once"):
            await anext(reading(bench.a))
        await anext(other := reading(bench.b))
        for each in (*unread, other):
            await each.aclose()
        assert bench.world.metric("fl_transfer_calls", kind="downloads") == 0


async def test_a_fetch_beyond_the_limit_of_fetches_is_refused(tmp_path: Path) -> None:
    """Also in the middle of a fetch, which can continue later; other resources have their own count."""
    async with World(tmp_path, transfers={"fetches": 2}) as world:
        a = await Device("a", options={"model": "frozen"}, works=False).connect(world)
        await world.create(
            round={"clients_per_round": 1}, task={"name": TASK, "options": {"model": "frozen"}}, stop={"rounds": 2}
        )
        frozen = (work := await a.assigned()).resources[-1]
        for _ in range(2):
            await a.fetch(world, frozen.digest)
        with pytest.raises(LimitExceeded, match="2 fetches of a resource for one assignment") as refused:
            await a.fetch(world, frozen.digest)
        assert refused.value.detail.wait.seconds == 30
        assert world.metric("fl_transfer_limits_total", limit="fetches") == 1
        for resource in work.resources[:-1]:
            await a.fetch(world, resource.digest)


async def test_an_unchanged_part_is_read_once(tmp_path: Path) -> None:
    """For any number of queries: once after a restart, and never in the process that wrote it."""
    async with upload_setup(tmp_path) as bench:
        with pytest.raises(Exception, match="200 bytes are kept"):
            await bench.submit(*bench.parts()[:3])
        spool = bench.world.spool
        reads = spool.prefixes.reads
        assert [await bench.kept() for _ in range(20)] == [200] * 20
        assert spool.prefixes.reads == reads
        again, key = Spool(tmp_path / "spool"), SpoolKey("r", 0, 0, "a")
        digest = bench.header.digest.value
        assert [again.kept(key, digest) for _ in range(20)] == [200] * 20
        assert again.prefixes.reads == 1


async def test_a_part_that_changed_is_read_again(tmp_path: Path) -> None:
    """A chunk that differs from its checksum is not kept."""
    async with upload_setup(tmp_path) as bench:
        with pytest.raises(Exception, match="200 bytes are kept"):
            await bench.submit(*bench.parts()[:3])
        (part,) = (tmp_path / "spool").rglob("a.part")
        with part.open("r+b") as file:
            file.seek(150)
            file.write(b"\xff\x00\xff")
        os.utime(part, ns=(1, 1))
        assert await bench.kept() == 100


async def test_nothing_is_read_for_an_upload_that_would_be_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For another round, another exchange or another client's assignment: 0 bytes, without a read of the disk."""
    async with upload_setup(tmp_path) as bench:
        lookups = []
        monkeypatch.setattr(bench.world.uploads, "kept_bytes", lambda *key: lookups.append(key))
        for changes in ({"round": 7}, {"round": 2**32 - 1}, {"exchange": 3}):
            header, _ = bench.changed()
            for name, value in changes.items():
                setattr(header.key, name, value)
            query = pb.QueryUploadRequest(session_id=bench.a.session, key=header.key, digest=header.digest)
            assert (await bench.world.service.QueryUpload(query, NO_CONTEXT)).kept_bytes == 0
        assert not lookups


async def test_queries_are_answered_while_uploads_use_all_threads(tmp_path: Path) -> None:
    """Queries have their own threads."""
    async with upload_setup(tmp_path) as bench:
        io, release = bench.world.services.io, threading.Event()
        busy = [io.submit(release.wait, 20) for _ in range(io._max_workers)]
        assert await bench.kept() == 0
        release.set()
        assert all(each.result() for each in busy)


async def test_the_chunks_of_an_upload_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs a write and a checksum: an upload in chunks of a byte would fill the disk with checksums."""
    monkeypatch.setattr("fl_server.uploads.stream._FREE_CHUNKS", 3)
    async with upload_setup(tmp_path) as bench:
        parts = upload(bench.header, bench.data, bench.a.session, chunk=1)
        with pytest.raises(InvalidInput, match="chunk: expected 3 chunks of an upload at most"):
            await bench.submit(*parts)


DIGEST = digest_of(b"update")


def leave_unfinished(spool: Any, run: Any, client: str = "a", size: int = 100) -> None:
    """Write and close an unfinished upload."""
    spool.open_part(SpoolKey(run, 0, 0, client), DIGEST, size).close()


def unfinished(spool_folder: Path) -> list[str]:
    """Runs in which client a has an unfinished upload."""
    return sorted(path.parents[2].name for path in spool_folder.rglob("a.part"))


def test_the_unfinished_uploads_of_a_client_are_limited(tmp_path: Path) -> None:
    """One more removes the oldest; those of other clients stay."""
    spool = Spool(tmp_path, unfinished_limit=UnfinishedLimit(files=2, bytes=1 << 20))
    leave_unfinished(spool, "one", client="b")
    for run in ("one", "two", "three"):
        leave_unfinished(spool, run)
    assert unfinished(tmp_path) == ["run-three", "run-two"]
    assert list(tmp_path.rglob("b.part"))


def test_the_bytes_of_a_clients_unfinished_uploads_are_limited(tmp_path: Path) -> None:
    """A single upload of any size is kept."""
    spool = Spool(tmp_path, unfinished_limit=UnfinishedLimit(files=9, bytes=250))
    for run in ("one", "two", "three"):
        leave_unfinished(spool, run)
    assert unfinished(tmp_path) == ["run-three", "run-two"]
    leave_unfinished(spool, "large", size=1000)
    assert unfinished(tmp_path) == ["run-large"]


def test_an_open_upload_is_not_removed_for_another(tmp_path: Path) -> None:
    """Another one is refused until one of them is closed."""
    spool = Spool(tmp_path, unfinished_limit=UnfinishedLimit(files=1))
    part = spool.open_part(SpoolKey("one", 0, 0, "a"), DIGEST, 100)
    with pytest.raises(TooManyUnfinished, match="a has too many uploads open"):
        leave_unfinished(spool, "two")
    part.close()
    leave_unfinished(spool, "two")
    assert unfinished(tmp_path) == ["run-two"]


def test_files_in_the_spool_at_a_start_count(tmp_path: Path) -> None:
    """A restart does not reset a client's limit."""
    leave_unfinished(Spool(tmp_path), "one")
    spool = Spool(tmp_path, unfinished_limit=UnfinishedLimit(files=1))
    spool.sweep()
    leave_unfinished(spool, "two")
    assert unfinished(tmp_path) == ["run-two"]


def test_nothing_is_remembered_of_ended_uploads(tmp_path: Path) -> None:
    """Whether they were sealed or removed with their rounds."""
    spool = Spool(tmp_path)
    for number in range(20):
        leave_unfinished(spool, f"run-{number}", client=f"client-{number}")
    assert len(spool._unfinished) == 20
    for number in range(10):
        spool.remove_round(f"run-{number}", 0)
    for number in range(10, 20):
        spool.remove_run(f"run-{number}")
    assert len(spool._unfinished) == 0


async def test_an_upload_over_the_limit_is_accepted_later(tmp_path: Path) -> None:
    """The refusal names the limit; the same call succeeds later."""
    async with upload_setup(tmp_path, transfers={"kept_files": 1}) as bench:
        part = bench.world.spool.open_part(SpoolKey("other", 0, 0, "a"), DIGEST, 100)
        with pytest.raises(LimitExceeded, match="1 unfinished uploads of 4096 MiB"):
            await bench.send()
        part.close()
        assert (await bench.send()).admitted


async def test_nothing_is_kept_of_a_banned_client(tmp_path: Path) -> None:
    """Its unfinished upload is removed, also without an open stream."""
    async with upload_setup(tmp_path) as bench:
        with pytest.raises(Exception, match="200 bytes are kept"):
            await bench.submit(*bench.parts()[:3])
        assert await asyncio.to_thread(lambda: list(tmp_path.rglob("a.part")))
        await bench.world.operators.ban("a", "why not", "admin")
        await until(lambda: not list(tmp_path.rglob("a.part")), "it is removed")


async def test_an_unread_attend_stream_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queued messages are dropped; the client registers again and gets its outstanding work."""
    monkeypatch.setattr(sessions, "UNREAD_S", 0.0)
    async with World(tmp_path, transfers={"messages_waiting": 10}) as world:
        a = Device("a", works=False)
        a.session = (await world.service.Register(a.registration(), NO_CONTEXT)).session_id
        unread = aiter(world.service.Attend(pb.AttendRequest(session_id=a.session), NO_CONTEXT))
        await anext(unread)
        for _ in range(12):
            world.fleet.streams.push("a", pb.AttendResponse(notice=pb.Notice(text="again")))
        assert not world.fleet.attendance.attached("a")
        assert world.metric("fl_transfer_limits_total", limit="messages") == 1
        with pytest.raises(UnknownSessionError):
            await anext(unread)
        await world.create(round={"clients_per_round": 1})
        assert (await (await a.connect(world)).assigned()).key.round == 0


async def test_many_messages_that_are_read_end_nothing(tmp_path: Path) -> None:
    """Only a stream that is not read is ended."""
    async with World(tmp_path, transfers={"messages_waiting": 10}) as world:
        a = await Device("a", works=False).connect(world)
        for _ in range(1000):
            world.fleet.streams.push("a", pb.AttendResponse(notice=pb.Notice(text="again")))
        await until(lambda: len(a.pushed("notice")) == 1000, "all are read")


async def test_a_repeated_evaluation_is_not_written_again(tmp_path: Path) -> None:
    """The first report counts, and the ledger is not read."""
    async with World(tmp_path) as world:
        a, b = [await Device(name, eval_examples=10).connect(world) for name in "ab"]
        await world.create(**WITH_CLIENT_EVALUATION)
        await a.asked_to_evaluate()
        await a.report(world, accuracy=0.25)
        writes = world.journal.writes.count("record_evaluation")
        for _ in range(20):
            await a.report(world, accuracy=0.75)
        assert world.journal.writes.count("record_evaluation") == writes == 1
        await b.report(world)
