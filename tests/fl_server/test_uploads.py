"""The way of an update: judged by its header, taken chunk by chunk, and answered once and for all."""

from __future__ import annotations

import asyncio
import math
import struct

import pytest

from fl_server import events as ev
from fl_server.errors import Forbidden, InvalidInput, UploadBroken
from fl_server.spool import SpoolKey
from protos.codec import digest_message
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2 as messages
from protos.fl.v1.tensor_pb2 import Digest
from tests.fl_server.bench import Bench, a_bench
from tests.fl_server.devices import Device
from tests.fl_server.harness import World, until


@pytest.fixture
async def bench(tmp_path):
    """Two devices that were drawn for round 0."""
    async with a_bench(tmp_path, stall_s=5.0) as bench:
        yield bench


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
