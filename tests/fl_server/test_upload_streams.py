"""Streams of uploads: cut, slow, silent or doubled, an update goes on where it was and is answered once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fl_server.errors import NotNow, UploadBroken
from fl_server.spool import SpoolKey
from fl_server.spool_parts import PartFile
from tests.fl_server.bench import a_bench, held
from tests.fl_server.devices import upload
from tests.fl_server.harness import until


@pytest.fixture
async def bench(tmp_path):
    """Two devices that were drawn for round 0."""
    async with a_bench(tmp_path, stall_s=5.0) as bench:
        yield bench


async def test_an_upload_that_was_cut_goes_on_where_it_stopped(bench):
    """Two chunks came; the query says so, and the rest makes it whole."""
    with pytest.raises(UploadBroken, match="the stream ended before the trailer; 200 bytes are kept"):
        await bench.submit(*bench.parts()[:3])
    assert await bench.kept() == 200
    assert (await bench.send(start=200)).admitted
    assert bench.world.metric("fl_uploads_resumed_total") == 1


async def test_a_start_behind_what_is_kept_is_told_where_to_start(bench):
    """Nothing is here and the sender begins at 100."""
    with pytest.raises(UploadBroken, match="expected a start at 0 or before, got 100") as error:
        await bench.submit(*bench.parts(start=100))
    assert error.value.detail.kept_bytes == 0
    assert (await bench.send()).admitted


async def test_no_more_is_read_than_is_written(bench, monkeypatch):
    """While a chunk waits for the disk its sender waits too: one chunk of each stream is in hand."""
    begun, go_on = held(monkeypatch, PartFile, "write")
    read = []

    async def parts():
        for message in bench.parts():
            read.append(message.WhichOneof("part"))
            yield message

    sending = asyncio.create_task(bench.world.service.SubmitUpdate(parts(), None))
    await until(begun.is_set, "a chunk is being written")
    for _ in range(100):
        await asyncio.sleep(0)
    assert read == ["header", "chunk"]
    go_on.set()
    assert (await sending).receipt.admitted


async def test_a_stream_that_brings_nothing_is_ended(tmp_path):
    """What came is kept, and the client may try again."""
    async with a_bench(tmp_path, stall_s=0.01) as bench:
        with pytest.raises(
            NotNow, match=r"less than a chunk of \d+ bytes came in 0.01 s; what came is kept; try again"
        ):
            await bench.submit(*bench.parts()[:2], hangs=True)
        assert await bench.kept() == 100
        assert (bench.world.uploads.in_flight, bench.world.metric("fl_uploads_in_flight_bytes")) == (0, 0)


async def test_a_stream_that_trickles_is_ended(tmp_path):
    """A byte every few milliseconds is no progress, although something always comes: it goes on later where it was."""
    async with a_bench(tmp_path, stall_s=0.3) as bench:

        async def trickle():
            for message in upload(bench.header, bench.data, bench.a.session, chunk=1):
                yield message
                await asyncio.sleep(0.005)

        with pytest.raises(NotNow, match=r"less than a chunk of \d+ bytes came in 0.3 s"):
            await bench.world.service.SubmitUpdate(trickle(), None)
        assert 0 < await bench.kept() < len(bench.data)
        assert (await bench.send(start=await bench.kept())).admitted


async def test_two_streams_for_one_update_do_not_mix(bench):
    """While an older one is open the newer waits; once the older is gone, it goes on."""
    older = asyncio.create_task(bench.submit(*bench.parts()[:2], hangs=True))
    await until(lambda: bench.run.log.bytes_up == 100, "the older one brought a chunk")
    with pytest.raises(NotNow, match="an older stream of this update is still open"):
        await bench.send()
    older.cancel()
    await asyncio.gather(older, return_exceptions=True)
    assert (await bench.send(start=100)).admitted


@pytest.mark.parametrize("came", [1, -1], ids=["at its first chunk", "at its trailer"])
async def test_a_repeat_that_is_on_its_way_when_the_round_closes_changes_nothing(bench, monkeypatch, came):
    """Begun before the first stream's word was in the ledger: it gets the same word, and the round has its bytes."""
    begun, go_on = held(monkeypatch, bench.run.model.engine, "step")
    await bench.b.contribute(bench.world, await bench.b.assigned())
    parts, closed, key = bench.parts(), asyncio.Event(), SpoolKey("r", 0, 0, "a")
    spool = bench.world.parts.spool._inner

    async def repeated():
        for part in parts[:came]:
            yield part
        await closed.wait()
        for part in parts[came:]:
            yield part

    async with bench.run.turn:
        first = asyncio.create_task(bench.send())
        await until(spool.path(key, bench.header.digest.value).exists, "it waits for its word")
        second = asyncio.create_task(bench.world.service.SubmitUpdate(repeated(), None))
        await until(lambda: (part := spool._parts[key]) and not part.closed, "the repeat is under way")
    await until(begun.is_set, "the round is closed")
    closed.set()
    assert (await second).receipt == await first
    go_on.set()
    await bench.world.completed()


@pytest.mark.parametrize("good", [True, False], ids=["admitted", "refused"])
async def test_a_stream_that_is_cut_while_its_answer_is_written(bench, monkeypatch, good):
    """What the ledger says the run knows: the round neither waits for the client nor loses its update."""
    begun, go_on = held(monkeypatch, bench.world.store, "record_update")
    header, data = (bench.header, bench.data) if good else bench.changed(num_steps=0)
    sending = asyncio.create_task(bench.send(header, data))
    await until(begun.is_set, "the answer is being written")
    sending.cancel()
    go_on.set()
    await asyncio.gather(sending, return_exceptions=True)
    await until(lambda: "a" not in bench.run.state.outstanding, "the run knows")
    assert bool(bench.run.state.admitted) == bench.line().admitted == good


async def test_a_stream_that_is_cut_while_its_file_is_opened(bench, monkeypatch):
    """Nobody writes into it any more, so the next stream may."""
    begun, go_on = held(monkeypatch, bench.world.parts.spool._inner, "open_part")
    sending = asyncio.create_task(bench.send())
    await until(begun.is_set, "the file is being opened")
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    go_on.set()
    spool = bench.world.parts.spool._inner
    part = await until(lambda: spool._parts.get(SpoolKey("r", 0, 0, "a")), "it is opened")
    await until(lambda: part.closed, "it is closed again")
    assert (await bench.send()).admitted


async def test_a_stream_that_is_cut_while_its_file_waits_to_be_closed(bench):
    """Also when no thread is free for that before the call is cancelled once more, the next stream may go on."""
    sending = asyncio.create_task(bench.submit(*bench.parts()[:2], hangs=True))
    await until(lambda: bench.run.log.bytes_up, "a chunk has come")
    part = bench.world.parts.spool._inner._parts[SpoolKey("r", 0, 0, "a")]
    io, go_on = bench.world.parts.io, threading.Event()
    busy = [io.submit(go_on.wait, 20) for _ in range(io._max_workers)]
    await until(lambda: all(each.running() for each in busy), "no thread is free")
    sending.cancel()
    await until(lambda: io._work_queue.qsize() == 1, "the file waits to be closed")
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    go_on.set()
    assert all(each.result() for each in busy)
    await until(lambda: part.closed, "it is closed")
    assert (await bench.send(start=bench.run.log.bytes_up)).admitted
