"""Interrupted, slow, silent and duplicate upload streams: an upload resumes, and its update gets one verdict."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fl_server.admission.gate import AdmissionGate
from fl_server.errors import NotNow, UploadBroken
from fl_server.store.errors import StoreError, remove_folder
from fl_server.store.spool.part_file import PartFile
from fl_server.store.spool.spool import Spool, SpoolKey
from fl_server.uploads.stream import ReadSlots
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import REFUSAL_REASON_LATE
from tests.fl_server.devices import NO_CONTEXT, upload
from tests.fl_server.harness import until
from tests.fl_server.upload_setup import UploadSetup, block_method, upload_setup


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[UploadSetup]:
    """Two devices that were drawn for round 0."""
    async with upload_setup(tmp_path, stall_s=5.0) as setup:
        yield setup


async def test_an_interrupted_upload_resumes_where_it_stopped(setup: UploadSetup) -> None:
    """Two chunks are kept: the query returns their size, and the rest completes the update."""
    with pytest.raises(UploadBroken, match="the stream ended before the trailer; 200 bytes are kept"):
        await setup.submit(*setup.parts()[:3])
    assert await setup.kept() == 200
    assert (await setup.send(start=200)).admitted
    assert setup.world.metric("fl_uploads_resumed_total") == 1


async def test_a_start_after_the_kept_bytes_is_refused(setup: UploadSetup) -> None:
    """No bytes are kept and the sender starts at 100: the error has the right offset."""
    with pytest.raises(UploadBroken, match="expected a start at 0 or before, got 100") as error:
        await setup.submit(*setup.parts(start=100))
    assert error.value.detail.kept_bytes == 0
    assert (await setup.send()).admitted


async def test_a_stream_is_read_no_faster_than_it_is_written(
    setup: UploadSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a chunk waits for the disk, its sender waits too: one chunk of each stream is in memory."""
    called, proceed = block_method(monkeypatch, PartFile, "write")
    read = []

    async def parts() -> AsyncIterator[pb.SubmitUpdateRequest]:
        for message in setup.parts():
            read.append(message.WhichOneof("part"))
            yield message

    sending = asyncio.create_task(setup.world.service.SubmitUpdate(parts(), NO_CONTEXT))
    await until(called.is_set, "a chunk is being written")
    for _ in range(100):
        await asyncio.sleep(0)
    assert read == ["header", "chunk"]
    proceed.set()
    assert (await sending).receipt.admitted


async def test_a_silent_stream_holds_up_no_other_one(setup: UploadSetup) -> None:
    """With a slot for one chunk: the upload behind a client that sends nothing is admitted, and so is that client's."""
    setup.world.uploads._parts._slots = ReadSlots(1, patience_s=0.001)
    header, data = await setup.b.update(setup.world, await setup.b.assigned())
    silent = asyncio.create_task(setup.submit(*setup.parts()[:2], hangs=True))
    await until(lambda: setup.run.rounds.bytes.up, "a chunk of the silent stream has arrived")
    assert (await setup.send(header, data, device=setup.b)).admitted
    silent.cancel()
    await asyncio.gather(silent, return_exceptions=True)
    assert (await setup.send(start=setup.run.rounds.bytes.up - len(data))).admitted


async def test_a_silent_stream_is_ended(tmp_path: Path) -> None:
    """The received bytes are kept, and the client may try again."""
    async with upload_setup(tmp_path, stall_s=0.01) as setup:
        with pytest.raises(
            NotNow, match=r"less than a chunk of \d+ bytes came in 0.01 s; what came is kept; try again"
        ):
            await setup.submit(*setup.parts()[:2], hangs=True)
        assert await setup.kept() == 100
        assert (setup.world.uploads.in_flight, setup.world.metric("fl_uploads_in_flight_bytes")) == (0, 0)


async def test_a_stream_that_is_too_slow_is_ended(tmp_path: Path) -> None:
    """A byte every few milliseconds is too slow, although it is never silent. The upload can be resumed."""
    async with upload_setup(tmp_path, stall_s=0.3) as setup:

        async def trickle() -> AsyncIterator[pb.SubmitUpdateRequest]:
            for message in upload(setup.header, setup.data, setup.a.session, chunk=1):
                yield message
                await asyncio.sleep(0.005)

        with pytest.raises(NotNow, match=r"less than a chunk of \d+ bytes came in 0.3 s"):
            await setup.world.service.SubmitUpdate(trickle(), NO_CONTEXT)
        assert 0 < await setup.kept() < len(setup.data)
        assert (await setup.send(start=await setup.kept())).admitted


async def test_two_streams_for_one_update_do_not_mix(setup: UploadSetup) -> None:
    """While the older one is open the newer is refused; after that it resumes."""
    older = asyncio.create_task(setup.submit(*setup.parts()[:2], hangs=True))
    await until(lambda: setup.run.rounds.bytes.up == 100, "the older stream has sent a chunk")
    with pytest.raises(NotNow, match="an older stream of this update is still open"):
        await setup.send()
    older.cancel()
    await asyncio.gather(older, return_exceptions=True)
    assert (await setup.send(start=100)).admitted


@pytest.mark.parametrize("sent", [1, -1], ids=["at its first chunk", "at its trailer"])
async def test_a_repeated_upload_that_is_open_when_the_round_closes_changes_nothing(
    setup: UploadSetup, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    """It started before the first verdict was in the ledger: it gets the same verdict, and no byte changes."""
    called, proceed = block_method(monkeypatch, setup.run.model.engine, "server_update")
    await setup.b.contribute(setup.world, await setup.b.assigned())
    parts, closed, key = setup.parts(), asyncio.Event(), SpoolKey("r", 0, 0, "a")
    spool = setup.world.spool

    async def repeated() -> AsyncIterator[pb.SubmitUpdateRequest]:
        for part in parts[:sent]:
            yield part
        await closed.wait()
        for part in parts[sent:]:
            yield part

    async with setup.run.turn:
        first = asyncio.create_task(setup.send())
        await until(spool.path(key, setup.header.digest.value).exists, "the first update waits for its verdict")
        second = asyncio.create_task(setup.world.service.SubmitUpdate(repeated(), NO_CONTEXT))
        await until(lambda: (part := spool._parts[key]) and not part.closed, "the repeated upload has started")
    await until(called.is_set, "the round is closed")
    closed.set()
    assert (await second).receipt == await first
    proceed.set()
    await setup.world.completed()


@pytest.mark.parametrize("good", [True, False], ids=["admitted", "refused"])
async def test_a_stream_that_breaks_while_its_verdict_is_written(
    setup: UploadSetup, monkeypatch: pytest.MonkeyPatch, good: bool
) -> None:
    """Run and ledger agree: the round neither waits for the client nor loses its update."""
    called, proceed = block_method(monkeypatch, setup.world.store, "record_update")
    header, data = (setup.header, setup.data) if good else setup.changed(num_steps=0)
    sending = asyncio.create_task(setup.send(header, data))
    await until(called.is_set, "the verdict is being written")
    sending.cancel()
    proceed.set()
    await asyncio.gather(sending, return_exceptions=True)
    await until(lambda: "a" not in setup.run.state.outstanding, "the run has the verdict")
    assert bool(setup.run.state.admitted) == setup.recorded().admitted == good


async def test_a_stream_that_breaks_while_its_file_is_opened(
    setup: UploadSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is closed again, so the next stream can write it."""
    called, proceed = block_method(monkeypatch, setup.world.spool, "open_part")
    sending = asyncio.create_task(setup.send())
    await until(called.is_set, "the file is being opened")
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    proceed.set()
    spool = setup.world.spool
    part = await until(lambda: spool._parts.get(SpoolKey("r", 0, 0, "a")), "the file is open")
    await until(lambda: part.closed, "the file is closed again")
    assert (await setup.send()).admitted


async def test_a_stream_that_breaks_while_its_file_waits_to_be_closed(setup: UploadSetup) -> None:
    """No thread is free to close it before the call is cancelled again: the next stream can still resume."""
    sending = asyncio.create_task(setup.submit(*setup.parts()[:2], hangs=True))
    await until(lambda: setup.run.rounds.bytes.up, "a chunk has arrived")
    part = setup.world.spool._parts[SpoolKey("r", 0, 0, "a")]
    assert part is not None
    io, proceed = setup.world.services.io, threading.Event()
    busy = [io.submit(proceed.wait, 20) for _ in range(io._max_workers)]
    await until(lambda: all(each.running() for each in busy), "no thread is free")
    sending.cancel()
    await until(lambda: io._work_queue.qsize() == 1, "the file waits to be closed")
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    proceed.set()
    assert all(each.result() for each in busy)
    await until(lambda: part.closed, "the file is closed")
    assert (await setup.send(start=setup.run.rounds.bytes.up)).admitted


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Spool, "_opened"), (AdmissionGate, "read"), (PartFile, "seal")],
    ids=["opened", "checked", "sealed"],
)
async def test_an_upload_whose_round_is_removed_is_late(
    setup: UploadSetup, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    """The files of a closed round are removed also under an open upload; that is no fault of the coordinator."""
    called, proceed = block_method(monkeypatch, owner, name)
    sending = setup.world.spawn(setup.send())
    await until(called.is_set, "the upload is there")
    await setup.world.coordinator.actions.stop(setup.run, "", "admin")
    await until(lambda: not list(setup.world.config.state_dir.glob("spool/run-r/round-*")), "the round is removed")
    proceed.set()
    receipt = await sending
    assert (receipt.admitted, receipt.reason) == (False, REFUSAL_REASON_LATE)
    assert (setup.files(), setup.line()) == ([], None)


async def test_a_lost_file_of_a_round_under_way_is_a_fault(setup: UploadSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update is still wanted, so it is not late: the operator finds the cause in the log."""
    called, proceed = block_method(monkeypatch, PartFile, "seal")
    sending = setup.world.spawn(setup.send())
    await until(called.is_set, "the upload is there")
    remove_folder(setup.world.config.state_dir / "spool" / "run-r", "lose it")
    proceed.set()
    with pytest.raises(StoreError, match=r"could not seal .*No such file"):
        await sending
