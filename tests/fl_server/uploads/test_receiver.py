"""The upload of an update: header check, chunks, and one final receipt."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fl_server.errors import Forbidden, InvalidInput, UploadBroken
from fl_server.rounds import events as ev
from fl_server.rpc.views import run_status
from fl_server.store.errors import StoreFull
from fl_server.store.spool.spool import SpoolKey
from protos.codec import digest_message
from protos.fl.v1 import admin_pb2
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2 as messages
from protos.fl.v1.tensor_pb2 import DIGEST_ALGORITHM_BLAKE3_256, Digest
from tests.fl_server.devices import NO_CONTEXT, Device
from tests.fl_server.harness import World, until
from tests.fl_server.upload_setup import UploadSetup, upload_setup


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[UploadSetup]:
    """Two devices that were drawn for round 0."""
    async with upload_setup(tmp_path, stall_s=5.0) as setup:
        yield setup


async def test_a_good_update_is_admitted(setup: UploadSetup) -> None:
    """The receipt has the digest, the spool the bytes, and the ledger the header's numbers and the norm."""
    receipt = await setup.send()
    assert (receipt.admitted, receipt.digest, receipt.key) == (True, setup.header.digest, setup.assignment.key)
    key = SpoolKey("r", 0, 0, "a")
    assert setup.world.services.spool.path(key, receipt.digest.value).read_bytes() == setup.data
    line = setup.recorded()
    assert (line.num_examples, line.num_steps, line.training_loss) == (11, 2, 0.5)
    assert line.norm > 0
    await until(lambda: setup.run.state.admitted, "the run has the update")
    assert setup.world.metric("fl_transfer_bytes_total", direction="up", kind="update") == len(setup.data)


REFUSED_HEADERS: list[tuple[str, dict[str, Any]]] = [
    ("HEADER", {"num_examples": 0}),
    ("HEADER", {"num_examples": 2**64 - 1}),
    ("HEADER", {"num_steps": 0}),
    ("STATE_EPOCH", {"state_epoch": 1}),
    ("HEADER", {"num_steps": 0, "attempt": 2**32 - 1}),
    ("LAYOUT", {"payloads": []}),
    ("LAYOUT", {"payloads": [messages.Payload(kind=messages.PAYLOAD_KIND_FULL_GRADIENT)]}),
    ("LAYOUT", {"payloads": [messages.Payload(kind=messages.PAYLOAD_KIND_DELTA)]}),
    ("SIZE", {"size_bytes": 2**64 - 1}),
    ("SIZE", {"size_bytes": 0}),
    ("DIGEST", {"digest": Digest(algorithm=DIGEST_ALGORITHM_BLAKE3_256, value=b"x" * 100_000)}),
    ("DIGEST", {"digest": Digest()}),
]
"""Reason of the refusal, and changed fields."""


@pytest.mark.parametrize(("reason", "values"), REFUSED_HEADERS)
async def test_a_header_is_refused_before_its_bytes(setup: UploadSetup, reason: str, values: dict[str, Any]) -> None:
    """The refusal is final and in the ledger, no byte is on disk, and the round does not wait for the client."""
    header, _ = setup.changed(**values)
    header.session_id = setup.a.session
    receipt = await setup.submit(pb.SubmitUpdateRequest(header=header))
    assert (receipt.admitted, receipt.reason) == (False, getattr(messages, f"REFUSAL_REASON_{reason}"))
    assert (await setup.send()).reason == receipt.reason
    assert len(setup.recorded().digest) in {0, 32}
    assert setup.recorded().attempt < 2**31
    assert setup.world.services.spool.sweep() == []
    await until(lambda: setup.run.state.out == {"a"}, "the client is out of the round")
    assert setup.world.fleet.records.get("a").note.startswith("update refused (")


@pytest.mark.parametrize(
    ("value", "reason"),
    [(math.nan, messages.REFUSAL_REASON_NOT_FINITE), (math.inf, messages.REFUSAL_REASON_NOT_FINITE)],
)
async def test_values_that_are_not_finite_are_refused(setup: UploadSetup, value: float, reason: int) -> None:
    """The receipt names the tensor, and no byte of the update stays."""
    receipt = await setup.send(*setup.changed(struct.pack("<f", value) + setup.data[4:]))
    assert (receipt.reason, receipt.detail) == (
        reason,
        "delta, tensor '0.weight': expected finite values, got a NaN or an infinity",
    )
    assert setup.world.services.spool.sweep() == []


async def test_a_loss_that_is_nan_is_left_out(setup: UploadSetup) -> None:
    """The loss is only information: the update counts, and the round's mean loss is that of the others."""
    await setup.send(*setup.changed(training_loss=math.nan))
    await setup.b.contribute(setup.world, await setup.b.assigned())
    await setup.world.completed()
    assert setup.recorded().training_loss is None
    assert setup.run.rounds.recent[0].training_loss == 0.5


async def test_chunks_that_are_not_in_order_break_the_upload(setup: UploadSetup) -> None:
    """One is missing: the bytes before it are kept."""
    header, first, _, third, *_ = setup.parts()
    with pytest.raises(UploadBroken, match="expected a chunk at offset 100, got offset 200"):
        await setup.submit(header, first, third)
    assert await setup.kept() == 100


async def test_a_damaged_chunk_breaks_the_upload(setup: UploadSetup) -> None:
    """A chunk with a wrong CRC is not kept, and the sender resumes before it."""
    header, first, second, *_ = setup.parts()
    second.chunk.crc32c ^= 1
    with pytest.raises(UploadBroken, match="send it again; 100 bytes are kept"):
        await setup.submit(header, first, second)
    assert (await setup.send(start=100)).admitted


async def test_a_trailer_that_comes_early_breaks_the_upload(setup: UploadSetup) -> None:
    """Bytes are missing, so the update is not complete."""
    header, first, *_, trailer = setup.parts()
    with pytest.raises(UploadBroken, match=f"the upload ended short of {len(setup.data)} bytes; 100 bytes are kept"):
        await setup.submit(header, first, trailer)


async def test_messages_out_of_place_are_refused(setup: UploadSetup) -> None:
    """A stream starts with a header, and has only one."""
    header, first, *_ = setup.parts()
    with pytest.raises(InvalidInput, match="part: expected a header first, got chunk"):
        await setup.submit(first)
    with pytest.raises(InvalidInput, match="part: expected a header first, got nothing"):
        await setup.submit()
    with pytest.raises(InvalidInput, match="part: expected a chunk or a trailer behind the header, got header"):
        await setup.submit(header, header)


async def test_a_wrong_digest_is_tolerated_once(setup: UploadSetup) -> None:
    """The first time the server's disk may be at fault: send all bytes again. The second time the update is refused."""
    header, data = setup.changed(digest=digest_message(bytes(32)))
    with pytest.raises(UploadBroken, match="the bytes have not the digest of the header; 0 bytes are kept"):
        await setup.send(header, data)
    assert (setup.line(), await setup.kept(header)) == (None, 0)
    receipt = await setup.send(header, data)
    assert (receipt.admitted, receipt.reason) == (False, messages.REFUSAL_REASON_DIGEST)
    assert "expected bytes with the digest blake3:000000" in receipt.detail


async def test_a_second_wrong_digest_is_refused(setup: UploadSetup) -> None:
    """Also if it differs from the first: one tolerated digest per key, and no growing memory of digests."""
    with pytest.raises(UploadBroken, match="the bytes have not the digest of the header"):
        await setup.send(*setup.changed(digest=digest_message(bytes(32))))
    receipt = await setup.send(*setup.changed(digest=digest_message(b"\1" * 32)))
    assert (receipt.admitted, receipt.reason) == (False, messages.REFUSAL_REASON_DIGEST)


async def test_a_repeated_update_gets_the_first_receipt(setup: UploadSetup) -> None:
    """The same receipt, after the header alone."""
    first = await setup.send()
    assert await setup.submit(setup.parts()[0]) == first
    assert setup.world.metric("fl_update_conflicts_total", run="r") == 0


async def test_another_update_for_the_same_work_is_a_conflict(setup: UploadSetup) -> None:
    """The first update stays: the receipt has its digest, and the conflict is counted."""
    first = await setup.send()
    assert await setup.send(*setup.changed(bytes(len(setup.data)))) == first
    assert setup.world.metric("fl_update_conflicts_total", run="r") == 1


async def test_an_update_of_a_client_that_was_not_drawn_is_refused(setup: UploadSetup) -> None:
    """Nothing is written, because a later attempt may draw the client."""
    c = await Device("c", works=False).connect(setup.world)
    receipt = await setup.send(device=c)
    assert (receipt.admitted, receipt.reason) == (False, messages.REFUSAL_REASON_NOT_ASSIGNED)
    assert setup.world.store.update_of("r", 0, 0, "c") is None


async def test_an_update_of_an_unknown_run_is_late(setup: UploadSetup) -> None:
    """The client then drops it. This happens after a coordinator's state was replaced."""
    setup.header.key.run_id = "x"
    receipt = await setup.send()
    assert (receipt.admitted, receipt.reason) == (False, messages.REFUSAL_REASON_LATE)


async def test_an_upload_in_progress_when_the_round_closes_is_late(setup: UploadSetup) -> None:
    """The rest is not read, the received bytes are removed, and nothing is written to the ledger."""
    header, *chunks = setup.parts()

    async def closed_meanwhile() -> AsyncIterator[pb.SubmitUpdateRequest]:
        yield header
        yield chunks[0]
        await setup.world.coordinator.actions.stop(setup.run, "", "admin")
        yield chunks[1]
        raise AssertionError("the stream should not be read any further")

    answer = await setup.world.service.SubmitUpdate(closed_meanwhile(), NO_CONTEXT)
    assert (answer.receipt.admitted, answer.receipt.reason) == (False, messages.REFUSAL_REASON_LATE)
    assert setup.line() is None


async def test_a_banned_clients_upload_ends(setup: UploadSetup) -> None:
    """The upload ends at its next message, and nothing of it counts."""
    header, *chunks = setup.parts()

    async def banned_meanwhile() -> AsyncIterator[pb.SubmitUpdateRequest]:
        yield header
        yield chunks[0]
        await setup.world.operators.ban("a", "it sends too much", "admin")
        yield chunks[1]
        raise AssertionError("the stream should not be read any further")

    with pytest.raises(Forbidden, match="to be unbanned .banned: it sends too much"):
        await setup.world.service.SubmitUpdate(banned_meanwhile(), NO_CONTEXT)
    assert setup.line() is None


@pytest.mark.parametrize(
    ("action", "message"), [("ban", "to be unbanned .banned: noise"), ("forget", "to register again: it was forgotten")]
)
async def test_a_silent_upload_of_a_banned_or_forgotten_client_ends_at_once(
    setup: UploadSetup, action: str, message: str
) -> None:
    """Nothing of it stays on disk or in the ledger, and the round completes without the client."""
    sending = setup.world.spawn(setup.submit(*setup.parts()[:3], hangs=True))
    await until(lambda: "a.part" in setup.files(), "the upload has started")
    await getattr(setup.world.operators, action)("a", *{"ban": ("noise", "admin"), "forget": ("admin",)}[action])
    with pytest.raises(Forbidden, match=message):
        await sending
    assert (setup.files(), setup.line()) == ([], None)
    await setup.b.contribute(setup.world, await setup.b.assigned())
    await setup.world.completed()
    assert (setup.run.rounds.recent[0].accepted, setup.run.rounds.recent[0].dropped) == (1, 1)


async def test_a_ban_just_before_an_update_is_recorded(setup: UploadSetup) -> None:
    """The update is complete and waits for the run's lock: it does not count, and the receipt has the reason."""
    async with setup.run.turn:
        sending = setup.world.spawn(setup.send())
        await until(lambda: any(name.endswith(".update") for name in setup.files()), "the update is in the spool")
        await setup.world.operators.ban("a", "noise", "admin")
    receipt = await sending
    assert (receipt.admitted, receipt.reason, receipt.detail) == (
        False, messages.REFUSAL_REASON_BANNED, "the client is banned"
    )  # fmt: skip
    assert setup.line() is None


async def test_a_draining_client_finishes_its_upload(setup: UploadSetup) -> None:
    """An upload that was in progress counts."""
    sending = setup.world.spawn(setup.submit(*setup.parts()[:3], hangs=True))
    await until(lambda: "a.part" in setup.files(), "the upload has started")
    await setup.world.operators.drain("a", "move", undo=False, actor="admin")
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert (await setup.send(start=await setup.kept())).admitted


async def test_a_norm_over_the_limit_is_refused(tmp_path: Path) -> None:
    """The limit of the run's configuration applies to the trainable part."""
    async with World(tmp_path) as world:
        a, b = [await Device(name, works=False).connect(world) for name in "ab"]
        run = await world.create(round={"clients_per_round": 2, "max_update_norm": 1e-6}, stop={"rounds": 1})
        setup = await UploadSetup(world, run, a, b).prepare()
        receipt = await setup.send()
        assert (receipt.reason, setup.recorded().admitted) == (messages.REFUSAL_REASON_NORM, False)
        assert receipt.detail.startswith("expected an update of norm 1e-06 at most (round.max_update_norm), got 0.")


async def test_a_client_that_reports_a_failure_is_out_of_the_round(setup: UploadSetup) -> None:
    """The reason is kept for operators, and the round does not wait for the client."""
    failure = pb.WorkFailure(key=setup.assignment.key, reason=pb.FAILURE_REASON_RESOURCES, message="no memory")
    request = pb.ReportStatusRequest(session_id=setup.a.session, failures=[failure])
    await setup.world.service.ReportStatus(request, NO_CONTEXT)
    await until(lambda: setup.run.state.out == {"a"}, "the client is out of the round")
    assert setup.world.fleet.records.get("a").note == "resources: no memory"
    setup.run.post(ev.DeadlinePassed())


@pytest.mark.parametrize("step", ["open_part", "record_update"])
async def test_a_full_disk_that_uploads_meet_first_is_shown(
    setup: UploadSetup, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The run waits with the reason, a gauge is set, and one warning is logged; all of it ends with a stored update."""

    def full(*_: object) -> None:
        raise StoreFull("no space left on device")

    run, world = setup.run, setup.world
    with monkeypatch.context() as patch, capture_logs() as lines:
        patch.setattr(world.spool if step == "open_part" else world.store, step, full)
        for _ in range(3):
            with pytest.raises(StoreFull):
                await setup.send()
        status = run_status(run)
        assert (status.state, world.metric("fl_run_cannot_write", run="r")) == (admin_pb2.RUN_STATE_WAITING, 1)
        assert status.reason == "the coordinator cannot store updates: no space left on device"
        assert [line["event"] for line in lines if line["log_level"] == "warning"] == ["uploads_not_stored"]
    assert (await setup.send()).admitted
    status = run_status(run)
    assert (status.state, status.reason) == (admin_pb2.RUN_STATE_RUNNING, "")
    assert world.metric("fl_run_cannot_write", run="r") == 0
