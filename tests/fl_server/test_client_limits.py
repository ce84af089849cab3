"""Limits of one client at the coordinator's own calls: streams, queries, fetches, unfinished uploads, messages."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from fl_server import sessions
from fl_server.clients import transfer_limits
from fl_server.errors import InvalidInput, LimitExceeded, NotNow, UnknownSessionError
from fl_server.spool import PartsHeld, Spool, SpoolKey
from fl_server.store.held_parts import MostHeld
from protos.codec import digest_of
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.asking import ASKING
from tests.fl_server.bench import a_bench
from tests.fl_server.devices import Device, stream, upload
from tests.fl_server.harness import TASK, World, until


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Refusals are not held."""
    monkeypatch.setattr(transfer_limits, "HOLD_S", 0.0)


async def test_a_stream_that_brings_no_header_is_ended(tmp_path):
    """Nobody knows whose it is, and nothing is kept of it."""
    async with World(tmp_path, stall_s=0.01) as world:
        with pytest.raises(NotNow, match=r"no header of an upload came in 0.01 s; try again in 1 s"):
            await world.service.SubmitUpdate(stream(hangs=True), None)


async def test_a_client_has_so_many_uploads_at_once(tmp_path):
    """One more is refused before a file is opened for it; when one is over, the next is taken."""
    async with a_bench(tmp_path, transfers={"uploads_at_once": 1}) as bench:
        older = asyncio.create_task(bench.submit(*bench.parts()[:2], hangs=True))
        await until(lambda: bench.run.log.bytes_up, "a chunk has come")
        with pytest.raises(LimitExceeded, match="1 uploads at once"):
            await bench.send()
        older.cancel()
        await asyncio.gather(older, return_exceptions=True)
        assert (await bench.send(start=100)).admitted


async def test_a_client_has_so_many_unread_downloads(tmp_path):
    """Another client's go on."""
    async with a_bench(tmp_path, transfers={"downloads_at_once": 2}) as bench:
        digest = bench.assignment.resources[0].digest

        def reading(device):
            return aiter(
                bench.world.service.FetchModel(pb.FetchModelRequest(session_id=device.session, digest=digest), None)
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


async def test_a_fetch_beyond_the_limit_of_fetches_is_refused(tmp_path):
    """Also in its middle, where it goes on later; other resources have their own count."""
    async with World(tmp_path, transfers={"fetches": 2}) as world:
        a = await Device("a", options={"model": "frozen"}, works=False).come(world)
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


async def test_an_unchanged_part_is_read_once(tmp_path):
    """However often it is asked for: after a restart once, and while the process lives not even that."""
    async with a_bench(tmp_path) as bench:
        with pytest.raises(Exception, match="200 bytes are kept"):
            await bench.submit(*bench.parts()[:3])
        spool = bench.world.parts.spool._inner
        reads = spool.prefixes.reads
        assert [await bench.kept() for _ in range(20)] == [200] * 20
        assert spool.prefixes.reads == reads
        again, key = Spool(tmp_path / "spool"), SpoolKey("r", 0, 0, "a")
        digest = bench.header.digest.value
        assert [again.kept(key, digest) for _ in range(20)] == [200] * 20
        assert again.prefixes.reads == 1


async def test_a_part_that_changed_is_read_again(tmp_path):
    """A chunk that is not as it was noted is not kept."""
    async with a_bench(tmp_path) as bench:
        with pytest.raises(Exception, match="200 bytes are kept"):
            await bench.submit(*bench.parts()[:3])
        (part,) = (tmp_path / "spool").rglob("a.part")
        with part.open("r+b") as file:
            file.seek(150)
            file.write(b"\xff\x00\xff")
        os.utime(part, ns=(1, 1))
        assert await bench.kept() == 100


async def test_nothing_is_looked_up_for_an_upload_that_would_not_be_taken(tmp_path, monkeypatch):
    """Of another round, another exchange or another client's assignment: 0 bytes, without a look at the disk."""
    async with a_bench(tmp_path) as bench:
        looks = []
        monkeypatch.setattr(bench.world.uploads, "kept_bytes", lambda *key: looks.append(key))
        for changes in ({"round": 7}, {"round": 2**32 - 1}, {"exchange": 3}):
            header, _ = bench.changed()
            for name, value in changes.items():
                setattr(header.key, name, value)
            query = pb.QueryUploadRequest(session_id=bench.a.session, key=header.key, digest=header.digest)
            assert (await bench.world.service.QueryUpload(query, None)).kept_bytes == 0
        assert not looks


async def test_queries_are_answered_while_uploads_have_all_threads(tmp_path):
    """They have threads of their own, and uploads keep theirs."""
    async with a_bench(tmp_path) as bench:
        io, go_on = bench.world.parts.io, threading.Event()
        busy = [io.submit(go_on.wait, 20) for _ in range(io._max_workers)]
        assert await bench.kept() == 0
        go_on.set()
        assert all(each.result() for each in busy)


async def test_an_upload_has_so_many_chunks_at_most(tmp_path, monkeypatch):
    """Each costs a write and a note: one in chunks of a byte would fill the disk with notes."""
    monkeypatch.setattr("fl_server.upload_parts._FREE_CHUNKS", 3)
    async with a_bench(tmp_path) as bench:
        parts = upload(bench.header, bench.data, bench.a.session, chunk=1)
        with pytest.raises(InvalidInput, match="chunk: expected 3 chunks of an upload at most"):
            await bench.submit(*parts)


DIGEST = digest_of(b"update")


def begun(spool, run, client="a", size=100):
    """An unfinished upload, closed."""
    spool.open_part(SpoolKey(run, 0, 0, client), DIGEST, size).close()


def unfinished(spool_folder):
    """Runs in which client a has an unfinished upload."""
    return sorted(path.parents[2].name for path in spool_folder.rglob("a.part"))


def test_a_client_keeps_so_many_unfinished_uploads(tmp_path):
    """The oldest goes for one more; other clients' stay."""
    spool = Spool(tmp_path, most_held=MostHeld(files=2, bytes=1 << 20))
    begun(spool, "one", client="b")
    for run in ("one", "two", "three"):
        begun(spool, run)
    assert unfinished(tmp_path) == ["run-three", "run-two"]
    assert list(tmp_path.rglob("b.part"))


def test_a_client_keeps_so_many_bytes_of_unfinished_uploads(tmp_path):
    """One upload is kept whatever its size."""
    spool = Spool(tmp_path, most_held=MostHeld(files=9, bytes=250))
    for run in ("one", "two", "three"):
        begun(spool, run)
    assert unfinished(tmp_path) == ["run-three", "run-two"]
    begun(spool, "large", size=1000)
    assert unfinished(tmp_path) == ["run-large"]


def test_what_is_written_is_not_removed_for_one_more(tmp_path):
    """The one more is refused, until one of them is closed."""
    spool = Spool(tmp_path, most_held=MostHeld(files=1))
    part = spool.open_part(SpoolKey("one", 0, 0, "a"), DIGEST, 100)
    with pytest.raises(PartsHeld, match="a writes 1 uploads already"):
        begun(spool, "two")
    part.close()
    begun(spool, "two")
    assert unfinished(tmp_path) == ["run-two"]


def test_what_lies_in_the_spool_at_a_start_counts(tmp_path):
    """A restart gives a client no second share."""
    begun(Spool(tmp_path), "one")
    spool = Spool(tmp_path, most_held=MostHeld(files=1))
    spool.sweep()
    begun(spool, "two")
    assert unfinished(tmp_path) == ["run-two"]


def test_of_uploads_that_are_over_nothing_is_remembered(tmp_path):
    """Sealed, or removed with their rounds."""
    spool = Spool(tmp_path)
    for number in range(20):
        begun(spool, f"run-{number}", client=f"client-{number}")
    assert len(spool._held) == 20
    for number in range(10):
        spool.remove_round(f"run-{number}", 0)
    for number in range(10, 20):
        spool.remove_run(f"run-{number}")
    assert len(spool._held) == 0


async def test_an_upload_that_waits_for_another_of_its_client_is_refused_for_a_while(tmp_path):
    """With the limit's name; the same call succeeds later."""
    async with a_bench(tmp_path, transfers={"kept_files": 1}) as bench:
        part = bench.world.parts.spool._inner.open_part(SpoolKey("other", 0, 0, "a"), DIGEST, 100)
        with pytest.raises(LimitExceeded, match="1 unfinished uploads of 4096 MiB"):
            await bench.send()
        part.close()
        assert (await bench.send()).admitted


async def test_of_a_banned_client_nothing_is_kept(tmp_path):
    """What it had sent of an upload is removed, also when no stream is open."""
    async with a_bench(tmp_path) as bench:
        with pytest.raises(Exception, match="200 bytes are kept"):
            await bench.submit(*bench.parts()[:3])
        assert list(tmp_path.rglob("a.part"))
        await bench.world.operators.ban("a", "why not", "admin")
        await until(lambda: not list(tmp_path.rglob("a.part")), "it is removed")


async def test_an_attend_stream_that_is_not_read_is_ended(tmp_path, monkeypatch):
    """What waits is let go; the client registers anew, and is sent its outstanding work."""
    monkeypatch.setattr(sessions, "UNREAD_S", 0.0)
    async with World(tmp_path, transfers={"messages_waiting": 10}) as world:
        a = Device("a", works=False)
        a.session = (await world.service.Register(a.registration(), None)).session_id
        unread = aiter(world.service.Attend(pb.AttendRequest(session_id=a.session), None))
        await anext(unread)
        for _ in range(12):
            world.fleet.push("a", pb.AttendResponse(notice=pb.Notice(text="again")))
        assert not world.fleet.attached("a")
        assert world.metric("fl_transfer_limits_total", limit="messages") == 1
        with pytest.raises(UnknownSessionError):
            await anext(unread)
        await world.create(round={"clients_per_round": 1})
        assert (await (await a.come(world)).assigned()).key.round == 0


async def test_many_messages_that_are_read_end_nothing(tmp_path):
    """Only a stream whose reader stands still."""
    async with World(tmp_path, transfers={"messages_waiting": 10}) as world:
        a = await Device("a", works=False).come(world)
        for _ in range(1000):
            world.fleet.push("a", pb.AttendResponse(notice=pb.Notice(text="again")))
        await until(lambda: len(a.told("notice")) == 1000, "all are read")


async def test_a_repeated_evaluation_is_not_written_again(tmp_path):
    """The first answer stands, and the ledger is not asked."""
    async with World(tmp_path) as world:
        a, b = [await Device(name, eval_examples=10).come(world) for name in "ab"]
        await world.create(**ASKING)
        await a.asked()
        await a.report(world, accuracy=0.25)
        writes = world.journal.writes.count("record_evaluation")
        for _ in range(20):
            await a.report(world, accuracy=0.75)
        assert world.journal.writes.count("record_evaluation") == writes == 1
        await b.report(world)
