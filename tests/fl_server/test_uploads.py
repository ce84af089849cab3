"""The way of an update: judged by its header, taken chunk by chunk, and answered once and for all."""

from __future__ import annotations

import asyncio
import math
import struct
import threading

import pytest

from fl_server import events as ev
from fl_server.errors import Forbidden, InvalidInput, NotNow, UploadBroken
from fl_server.spool import SpoolKey
from fl_server.spool_parts import PartFile
from protos.codec import digest_message
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2 as messages
from protos.fl.v1.tensor_pb2 import Digest
from tests.fl_server.devices import Device, announced, stream, upload
from tests.fl_server.harness import World, until

TWO = {"round": {"clients_per_round": 2}, "stop": {"rounds": 1}}


class Bench:
    """A run that waits for two updates, and what device a would send to it."""

    def __init__(self, world, run, a, b):
        self.world, self.run, self.a, self.b = world, run, a, b

    async def prepare(self):
        self.assignment = await self.a.assigned()
        self.header, self.data = await self.a.update(self.world, self.assignment)
        self.layout = self.run.model.engine.layout
        return self

    def changed(self, data=None, **header):
        """Header and bytes with something else in them; digest and size fit unless they are given."""
        return announced(self.assignment, self.layout, self.data if data is None else data, **header)

    async def send(self, header=None, data=None, start=0, device=None):
        """What the coordinator answers to an upload."""
        parts = upload(header or self.header, self.data if data is None else data, (device or self.a).session, start)
        return await self.submit(*parts)

    async def submit(self, *parts, hangs=False):
        answer = await self.world.service.SubmitUpdate(stream(*parts, hangs=hangs), None)
        return answer.receipt

    async def kept(self, header=None):
        """Where an upload would go on."""
        header = header or self.header
        query = pb.QueryUploadRequest(session_id=self.a.session, key=header.key, digest=header.digest)
        return (await self.world.service.QueryUpload(query, None)).kept_bytes

    def parts(self, **start):
        """The messages of a good upload."""
        return list(upload(self.header, self.data, self.a.session, **start))

    def files(self):
        """Names of what lies in the spool."""
        return sorted(path.name for path in (self.world.config.state_dir / "spool").rglob("*") if path.is_file())

    def line(self):
        """The ledger's line on device a."""
        return self.world.store.update_of("r", 0, 0, "a")


@pytest.fixture
async def bench(tmp_path):
    """Two devices that were drawn for round 0."""
    async with World(tmp_path, stall_s=5.0) as world:
        a, b = [await Device(name, works=False).come(world) for name in "ab"]
        yield await Bench(world, await world.create(**TWO), a, b).prepare()


async def test_a_good_update_is_admitted(bench):
    """The receipt has its digest, the spool its bytes, and the ledger the header's numbers and the norm."""
    receipt = await bench.send()
    assert (receipt.admitted, receipt.digest, receipt.key) == (True, bench.header.digest, bench.assignment.key)
    key = SpoolKey("r", 0, 0, "a")
    assert bench.world.parts.spool.path(key, receipt.digest.value).read_bytes() == bench.data
    line = bench.line()
    assert (line.num_examples, line.num_steps, line.training_loss) == (11, 2, 0.5)
    assert line.norm > 0
    await until(lambda: bench.run.state.admitted, "the run knows")
    assert bench.world.metric("fl_transfer_bytes_total", direction="up", kind="update") == len(bench.data)


def wrong(field, **values):
    """One case of a header that is refused."""
    return pytest.param(values, getattr(messages, f"REFUSAL_REASON_{field}"), id=f"{field}-{'-'.join(values)}")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        wrong("HEADER", num_examples=0),
        wrong("HEADER", num_examples=2**64 - 1),
        wrong("HEADER", num_steps=0),
        wrong("STATE_EPOCH", state_epoch=1),
        wrong("HEADER", num_steps=0, attempt=2**32 - 1),
        wrong("LAYOUT", payloads=[]),
        wrong("LAYOUT", payloads=[messages.Payload(kind=messages.PAYLOAD_KIND_FULL_GRADIENT)]),
        wrong("LAYOUT", payloads=[messages.Payload(kind=messages.PAYLOAD_KIND_DELTA)]),
        wrong("SIZE", size_bytes=2**64 - 1),
        wrong("SIZE", size_bytes=0),
        wrong("DIGEST", digest=Digest(algorithm=1, value=b"x" * 100_000)),
        wrong("DIGEST", digest=Digest()),
    ],
)
async def test_a_header_is_refused_before_its_bytes(bench, values, reason):
    """The word is in the ledger and stands, nothing of the update is on disk, and the client is not waited for."""
    header, _ = bench.changed(**values)
    header.session_id = bench.a.session
    receipt = await bench.submit(pb.SubmitUpdateRequest(header=header))
    assert (receipt.admitted, receipt.reason) == (False, reason)
    assert (await bench.send()).reason == reason
    assert len(bench.line().digest) in {0, 32}
    assert bench.line().attempt < 2**31
    assert bench.world.parts.spool.sweep() == []
    await until(lambda: bench.run.state.out == {"a"}, "it is out")
    assert bench.world.fleet.record("a").note.startswith("update refused (")


@pytest.mark.parametrize(
    ("value", "reason"),
    [(math.nan, messages.REFUSAL_REASON_NOT_FINITE), (math.inf, messages.REFUSAL_REASON_NOT_FINITE)],
)
async def test_bytes_that_are_no_numbers_are_refused(bench, value, reason):
    """The receipt names the tensor; nothing of the update stays."""
    receipt = await bench.send(*bench.changed(struct.pack("<f", value) + bench.data[4:]))
    assert (receipt.reason, receipt.detail) == (
        reason,
        "delta, tensor '0.weight': expected finite values, got a NaN or an infinity",
    )
    assert bench.world.parts.spool.sweep() == []


async def test_a_loss_that_is_no_number_is_left_out(bench):
    """It is for people only: the update counts, and the round's mean is of the others."""
    await bench.send(*bench.changed(training_loss=math.nan))
    await bench.b.contribute(bench.world, await bench.b.assigned())
    await bench.world.completed()
    assert bench.line().training_loss is None
    assert bench.run.log.commits[0].training_loss == 0.5


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


async def test_chunks_that_are_not_in_order_break_the_upload(bench):
    """With one left out, what came before it is kept."""
    header, first, _, third, *_ = bench.parts()
    with pytest.raises(UploadBroken, match="expected a chunk at offset 100, got offset 200"):
        await bench.submit(header, first, third)
    assert await bench.kept() == 100


async def test_a_damaged_chunk_breaks_the_upload(bench):
    """A wrong crc: the chunk is not kept, and the sender goes on in front of it."""
    header, first, second, *_ = bench.parts()
    second.chunk.crc32c ^= 1
    with pytest.raises(UploadBroken, match="send it again; 100 bytes are kept"):
        await bench.submit(header, first, second)
    assert (await bench.send(start=100)).admitted


async def test_a_trailer_that_comes_early_breaks_the_upload(bench):
    """The whole is not here, whatever the trailer says."""
    header, first, *_, trailer = bench.parts()
    with pytest.raises(UploadBroken, match=f"the upload ended short of {len(bench.data)} bytes; 100 bytes are kept"):
        await bench.submit(header, first, trailer)


async def test_messages_out_of_place_are_refused(bench):
    """A stream begins with a header, and has one."""
    header, first, *_ = bench.parts()
    with pytest.raises(InvalidInput, match="part: expected a header first, got chunk"):
        await bench.submit(first)
    with pytest.raises(InvalidInput, match="part: expected a header first, got nothing"):
        await bench.submit()
    with pytest.raises(InvalidInput, match="part: expected a chunk or a trailer behind the header, got header"):
        await bench.submit(header, header)


async def test_a_wrong_digest_is_forgiven_once(bench):
    """The first time the bytes may have been torn here: all are asked for again. The second time it is the sender."""
    header, data = bench.changed(digest=digest_message(bytes(32)))
    with pytest.raises(UploadBroken, match="the bytes have not the digest of the header; 0 bytes are kept"):
        await bench.send(header, data)
    assert (bench.line(), await bench.kept(header)) == (None, 0)
    receipt = await bench.send(header, data)
    assert (receipt.admitted, receipt.reason) == (False, messages.REFUSAL_REASON_DIGEST)
    assert "expected bytes with the digest blake3:000000" in receipt.detail


async def test_a_wrong_digest_is_not_forgiven_for_another_one(bench):
    """Whoever announces another digest each time is the one who is wrong, and nothing is remembered for each."""
    with pytest.raises(UploadBroken, match="the bytes have not the digest of the header"):
        await bench.send(*bench.changed(digest=digest_message(bytes(32))))
    receipt = await bench.send(*bench.changed(digest=digest_message(b"\1" * 32)))
    assert (receipt.admitted, receipt.reason) == (False, messages.REFUSAL_REASON_DIGEST)


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


async def test_a_repeat_gets_the_first_answer(bench):
    """Word for word, from its header alone."""
    first = await bench.send()
    assert await bench.submit(bench.parts()[0]) == first
    assert bench.world.metric("fl_update_conflicts_total", run="r") == 0


async def test_another_update_for_the_same_work_is_a_conflict(bench):
    """The first one stands: the receipt has its digest, and the conflict is counted."""
    first = await bench.send()
    assert await bench.send(*bench.changed(bytes(len(bench.data)))) == first
    assert bench.world.metric("fl_update_conflicts_total", run="r") == 1


async def test_who_was_not_drawn_is_told_so(bench):
    """Nothing is written: in a later attempt it may be drawn."""
    c = await Device("c", works=False).come(bench.world)
    receipt = await bench.send(device=c)
    assert (receipt.admitted, receipt.reason) == (False, messages.REFUSAL_REASON_NOT_ASSIGNED)
    assert bench.world.store.update_of("r", 0, 0, "c") is None


async def test_an_unknown_run_is_long_over(bench):
    """As after a coordinator's state was replaced: late, so that the client drops it."""
    bench.header.key.run_id = "x"
    receipt = await bench.send()
    assert (receipt.admitted, receipt.reason) == (False, messages.REFUSAL_REASON_LATE)


async def test_an_update_on_its_way_when_the_round_closes_is_late(bench):
    """The rest is not taken, what came is removed, and nothing is written."""
    header, *chunks = bench.parts()

    async def closed_meanwhile():
        yield header
        yield chunks[0]
        await bench.world.coordinator.stop(bench.run, "", "admin")
        yield chunks[1]
        raise AssertionError("no more is wanted")

    answer = await bench.world.service.SubmitUpdate(closed_meanwhile(), None)
    assert (answer.receipt.admitted, answer.receipt.reason) == (False, messages.REFUSAL_REASON_LATE)
    assert bench.line() is None


async def test_a_stream_that_brings_nothing_is_ended(tmp_path):
    """What came is kept, and the client may try again."""
    async with World(tmp_path, stall_s=0.01) as world:
        a, b = [await Device(name, works=False).come(world) for name in "ab"]
        bench = await Bench(world, await world.create(**TWO), a, b).prepare()
        with pytest.raises(
            NotNow, match=r"less than a chunk of \d+ bytes came in 0.01 s; what came is kept; try again"
        ):
            await bench.submit(*bench.parts()[:2], hangs=True)
        assert await bench.kept() == 100
        assert (world.uploads.in_flight, world.metric("fl_uploads_in_flight_bytes")) == (0, 0)


async def test_a_stream_that_trickles_is_ended(tmp_path):
    """A byte every few milliseconds is no progress, although something always comes: it goes on later where it was."""
    async with World(tmp_path, stall_s=0.3) as world:
        a, b = [await Device(name, works=False).come(world) for name in "ab"]
        bench = await Bench(world, await world.create(**TWO), a, b).prepare()

        async def trickle():
            for message in upload(bench.header, bench.data, a.session, chunk=1):
                yield message
                await asyncio.sleep(0.005)

        with pytest.raises(NotNow, match=r"less than a chunk of \d+ bytes came in 0.3 s"):
            await world.service.SubmitUpdate(trickle(), None)
        assert 0 < await bench.kept() < len(bench.data)
        assert (await bench.send(start=await bench.kept())).admitted


async def test_a_banned_clients_upload_ends(bench):
    """At its next message, in mid-transfer: nothing of it counts."""
    header, *chunks = bench.parts()

    async def banned_meanwhile():
        yield header
        yield chunks[0]
        await bench.world.operators.ban("a", "it sends too much", "admin")
        yield chunks[1]
        raise AssertionError("no more is wanted")

    with pytest.raises(Forbidden, match="to be unbanned .banned: it sends too much"):
        await bench.world.service.SubmitUpdate(banned_meanwhile(), None)
    assert bench.line() is None


@pytest.mark.parametrize(
    ("leave", "words"), [("ban", "to be unbanned .banned: noise"), ("forget", "to register again: it was forgotten")]
)
async def test_a_silent_upload_of_a_client_that_has_to_go_ends_at_once(bench, leave, words):
    """Nothing of it stays on disk or in the ledger, and the round goes on without it."""
    sending = bench.world.spawn(bench.submit(*bench.parts()[:3], hangs=True))
    await until(lambda: "a.part" in bench.files(), "it has begun")
    await getattr(bench.world.operators, leave)("a", *{"ban": ("noise", "admin"), "forget": ("admin",)}[leave])
    with pytest.raises(Forbidden, match=words):
        await sending
    assert (bench.files(), bench.line()) == ([], None)
    await bench.b.contribute(bench.world, await bench.b.assigned())
    await bench.world.completed()
    assert (bench.run.log.commits[0].accepted, bench.run.log.commits[0].dropped) == (1, 1)


async def test_a_ban_just_before_an_update_is_entered(bench):
    """All of it has come, and it waits for the run's turn: it does not count, and says why."""
    async with bench.run.turn:
        sending = bench.world.spawn(bench.send())
        await until(lambda: any(name.endswith(".update") for name in bench.files()), "it is in the spool")
        await bench.world.operators.ban("a", "noise", "admin")
    receipt = await sending
    assert (receipt.admitted, receipt.reason, receipt.detail) == (
        False, messages.REFUSAL_REASON_BANNED, "the client is banned"
    )  # fmt: skip
    assert bench.line() is None


async def test_a_draining_client_finishes_what_it_has(bench):
    """Its upload under way counts."""
    sending = bench.world.spawn(bench.submit(*bench.parts()[:3], hangs=True))
    await until(lambda: "a.part" in bench.files(), "it has begun")
    await bench.world.operators.drain("a", "move", undo=False, actor="admin")
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
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


def held(monkeypatch, owner, name):
    """Makes a method wait until the event it returns second is set; the first tells that it has begun."""
    begun, go_on, function = threading.Event(), threading.Event(), getattr(owner, name)

    def wait(*args, **kwargs):
        begun.set()
        assert go_on.wait(20)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, wait)
    return begun, go_on


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
        await until(lambda: not spool._parts[key].closed, "the repeat is under way")
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
    sending.cancel()
    await until(lambda: io._work_queue.qsize() == 1, "the file waits to be closed")
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    go_on.set()
    assert all(each.result() for each in busy)
    await until(lambda: part.closed, "it is closed")
    assert (await bench.send(start=bench.run.log.bytes_up)).admitted


async def test_a_norm_over_the_limit_is_refused(tmp_path):
    """The limit is of the trainable part, in the run's configuration."""
    async with World(tmp_path) as world:
        a, b = [await Device(name, works=False).come(world) for name in "ab"]
        run = await world.create(round={"clients_per_round": 2, "max_update_norm": 1e-6}, stop={"rounds": 1})
        bench = await Bench(world, run, a, b).prepare()
        receipt = await bench.send()
        assert (receipt.reason, bench.line().admitted) == (messages.REFUSAL_REASON_NORM, False)
        assert receipt.detail.startswith("expected an update of norm 1e-06 at most, got 0.")


async def test_a_failure_that_a_client_reports_takes_it_out(bench):
    """The reason is kept for operators; a client that is out is not waited for."""
    failure = pb.WorkFailure(key=bench.assignment.key, reason=pb.FAILURE_REASON_RESOURCES, message="no memory")
    request = pb.ReportStatusRequest(session_id=bench.a.session, failures=[failure])
    await bench.world.service.ReportStatus(request, None)
    await until(lambda: bench.run.state.out == {"a"}, "it is out")
    assert bench.world.fleet.record("a").note == "resources: no memory"
    bench.run.post(ev.DeadlinePassed())
