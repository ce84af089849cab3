"""Wrong updates are refused with a message, and other clients are not affected."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch

from protos.digests import digest_message, digest_of
from protos.fl.v1 import coordinator_pb2, errors_pb2, tensor_pb2, training_pb2
from protos.fl.v1.training_pb2 import RefusalReason
from tests.processes.federation import Coordinator
from tests.processes.process import Workspace
from tests.processes.raw_client import RawClient, Tensors, detail, messages

ONE = {"clients_per_round": 1, "min_clients": 1}
NUMBERS = itertools.count()


Work = tuple[RawClient, training_pb2.Assignment, Iterator[coordinator_pb2.AttendResponse]]
"""A client, its assignment and the events of its session."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """The coordinator of this module, without daemons."""
    with Workspace(tmp_path_factory.mktemp("bad-updates")) as workspace:
        yield Coordinator(workspace).serve()


@pytest.fixture
def work(server: Coordinator) -> Iterator[Work]:
    """A raw client with an assignment in its own run: (client, assignment, events)."""
    name = f"run-{next(NUMBERS)}"
    label = {"test": name}
    with RawClient(server.address, name) as client:
        client.register(labels=label)
        events = client.attend()
        server.create(name, round=ONE, stop={"rounds": 2}, labels=label)
        yield client, next(events).assignment, events
        with server.admin() as admin:
            if not admin.runs.get_run(name).run.HasField("ended"):
                admin.runs.stop_run(name, "its test is over")


def tensors(client: RawClient, assignment: training_pb2.Assignment) -> Tensors:
    """The model of the assignment: name -> tensor."""
    update = client.update(assignment)
    entries = update.header.payloads[0].manifest.tensors
    return {entry.name: torch.ones(list(entry.shape)) for entry in entries}


def rename(values: Tensors) -> Tensors:
    """Rename the first tensor."""
    first, *rest = values
    return {"0.wait": values[first], **{name: values[name] for name in rest}}


def reshape(values: Tensors) -> Tensors:
    """Transpose the first tensor: another shape of the same size."""
    first, *rest = values
    return {first: values[first].T.contiguous(), **{name: values[name] for name in rest}}


def double(values: Tensors) -> Tensors:
    """Convert the first tensor to float64."""
    first, *rest = values
    return {first: values[first].double(), **{name: values[name] for name in rest}}


def drop(values: Tensors) -> Tensors:
    """Remove the last tensor."""
    return dict(list(values.items())[:-1])


def poison(values: Tensors, with_what: float) -> Tensors:
    """Set one value of the last tensor to a number that is not finite."""
    last = list(values)[-1]
    values[last][0] = with_what
    return values


@pytest.mark.parametrize(
    ("change", "reason", "text"),
    [
        pytest.param(
            rename, "LAYOUT", "tensor '0.weight': expected shape (5, 4) float32, but it is missing", id="name"
        ),
        pytest.param(reshape, "LAYOUT", "tensor '0.weight': expected shape (5, 4) float32, got (4, 5)", id="shape"),
        pytest.param(double, "LAYOUT", "expected shape (5, 4) float32, got (5, 4) float64", id="dtype"),
        pytest.param(drop, "LAYOUT", "tensor '2.bias': expected shape (3,) float32, but it is missing", id="missing"),
        pytest.param(
            lambda values: poison(values, math.nan),
            "NOT_FINITE",
            "tensor '2.bias': expected finite values, got a NaN or an infinity",
            id="nan",
        ),
        pytest.param(
            lambda values: poison(values, math.inf),
            "NOT_FINITE",
            "tensor '2.bias': expected finite values, got a NaN or an infinity",
            id="infinity",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    server: Coordinator, work: Work, change: Callable[[Tensors], Tensors], reason: str, text: str
) -> None:
    """The receipt has the expected and the actual value. Nothing is spooled, and operators see the client's note."""
    client, assignment, _ = work
    receipt = client.submit(client.update_of(assignment, change(tensors(client, assignment))))
    assert (receipt.admitted, RefusalReason.Name(receipt.reason)) == (False, f"REFUSAL_REASON_{reason}")
    assert text in receipt.detail
    assert text in server.client(client.client_id).note
    assert server.client(client.client_id).updates_refused == 1
    assert server.run(assignment.key.run_id).admitted == 0


@pytest.mark.parametrize(
    ("field", "value", "reason", "text"),
    [
        pytest.param("size_bytes", 180, "SIZE", "expected 172 bytes", id="size"),
        pytest.param("size_bytes", 1 << 50, "SIZE", "got 1125899906842624", id="huge"),
        pytest.param("num_examples", 0, "HEADER", "examples and at least one step, got 0 and 1", id="examples"),
        pytest.param("num_steps", 0, "HEADER", "examples and at least one step, got 10 and 0", id="steps"),
        pytest.param("state_epoch", 3, "STATE_EPOCH", "expected client state of epoch 0, got 3", id="epoch"),
    ],
)
def test_a_header_that_does_not_fit_is_refused_before_bytes(
    work: Work, field: str, value: Any, reason: str, text: str
) -> None:
    """The header is checked first, and no memory is taken for its claims."""
    client, assignment, _ = work
    update = client.update(assignment)
    setattr(update.header, field, value)
    receipt = client.submit(update)
    assert (receipt.admitted, RefusalReason.Name(receipt.reason)) == (False, f"REFUSAL_REASON_{reason}")
    assert text in receipt.detail


def test_another_kind_of_payload_is_refused(work: Work) -> None:
    """A full gradient in place of a delta does not fit the layout of the round."""
    client, assignment, _ = work
    update = client.update(assignment)
    update.header.payloads[0].kind = training_pb2.PAYLOAD_KIND_FULL_GRADIENT
    receipt = client.submit(update)
    assert receipt.detail == "expected the payloads DELTA, got FULL_GRADIENT"


def test_bytes_with_a_wrong_digest_are_requested_again_once(work: Work) -> None:
    """The client has to send the bytes a second time, because its disk may be at fault. Then the update is refused."""
    client, assignment, _ = work
    update = client.update(assignment)
    update.header.digest.CopyFrom(digest_message(digest_of(b"something else")))
    with pytest.raises(grpc.RpcError) as failed:
        client.submit(update)
    broken = detail(failed.value)
    assert isinstance(broken, errors_pb2.BrokenUpload)
    assert broken.kept_bytes == 0
    receipt = client.submit(update)
    assert RefusalReason.Name(receipt.reason) == "REFUSAL_REASON_DIGEST"
    assert receipt.detail.startswith("expected bytes with the digest blake3:")


def test_a_damaged_chunk_is_asked_for_again(work: Work) -> None:
    """A chunk with a wrong checksum ends the stream. The earlier chunks are kept, and the upload resumes there."""
    client, assignment, _ = work
    update = client.update(assignment)
    parts = messages(update, 64)
    parts[2].chunk.crc32c ^= 1
    with pytest.raises(grpc.RpcError, match="expected crc32c") as failed:
        client.stub.SubmitUpdate(iter(parts), timeout=60)
    assert failed.value.code() == grpc.StatusCode.DATA_LOSS
    assert client.query(update).kept_bytes == 64
    update.header.resume_offset = 64
    assert client.submit(update).admitted


def test_a_chunk_out_of_place_is_refused(work: Work) -> None:
    """A gap in the stream is refused with the expected offset."""
    client, assignment, _ = work
    parts = messages(client.update(assignment), 64)
    with pytest.raises(grpc.RpcError, match="expected a chunk at offset 0, got offset 64"):
        client.stub.SubmitUpdate(iter([parts[0], parts[2]]), timeout=60)


def test_an_update_that_ends_early_is_not_counted(work: Work) -> None:
    """For a trailer before the last byte the reply has the number of kept bytes, and nothing is admitted."""
    client, assignment, _ = work
    parts = messages(client.update(assignment), 64)
    with pytest.raises(grpc.RpcError, match="the upload ended short of 172 bytes; 64 bytes are kept"):
        client.stub.SubmitUpdate(iter([*parts[:2], parts[-1]]), timeout=60)


def test_an_update_sent_twice_counts_once(server: Coordinator, work: Work) -> None:
    """The second answer equals the first, during the round and afterwards. The model is that of one update."""
    client, assignment, events = work
    update = client.update(assignment)
    first = client.submit(update)
    assert first.admitted
    assert first == client.submit(update)
    assert next(events).outcome.counted
    assert first == client.submit(update)
    assert first == client.query(update).receipt
    assert server.rounds(assignment.key.run_id)[0].accepted == 1


def test_the_first_of_two_updates_stands(server: Coordinator, work: Work) -> None:
    """Another digest for the same key gets the receipt of the first update, which is the one that counts."""
    client, assignment, events = work
    values = tensors(client, assignment)
    first = client.submit(client.update_of(assignment, values))
    second = client.update_of(assignment, {name: 2 * value for name, value in values.items()})
    assert client.submit(second) == first
    outcome = next(events).outcome
    assert (outcome.counted, outcome.digest) == (True, first.digest)


def test_an_update_for_a_closed_round_is_late(server: Coordinator, work: Work) -> None:
    """An update that arrives after the end of its run is refused as late and changes nothing."""
    client, assignment, _ = work
    update = client.update(assignment)
    with server.admin() as admin:
        admin.runs.stop_run(assignment.key.run_id, "enough")
    server.ended(assignment.key.run_id)
    receipt = client.submit(update)
    assert (receipt.reason, receipt.detail) == (training_pb2.REFUSAL_REASON_LATE, "the round is closed")


def test_an_update_for_another_client_is_not_assigned(server: Coordinator, work: Work) -> None:
    """A client that was not drawn cannot deliver for one that was."""
    _, assignment, _ = work
    with RawClient(server.address, "raw-stranger") as stranger:
        stranger.register()
        receipt = stranger.submit(stranger.update(assignment))
    assert (receipt.reason, receipt.detail) == (
        training_pb2.REFUSAL_REASON_NOT_ASSIGNED, "not of this round's cohort",
    )  # fmt: skip


def test_an_update_over_the_norm_is_refused(server: Coordinator) -> None:
    """round.max_update_norm: the receipt has the limit and the norm, which is sqrt(43) for 43 ones."""
    with RawClient(server.address, "raw-loud") as client:
        client.register(labels={"test": "loud"})
        events = client.attend()
        server.create("loud", round={**ONE, "max_update_norm": 6.0}, labels={"test": "loud"})
        receipt = client.submit(client.update(next(events).assignment))
    assert receipt.detail == "expected an update of norm 6 at most (round.max_update_norm), got 6.55744"


def test_a_protocol_mismatch_is_refused_with_both_ranges(server: Coordinator) -> None:
    """A client of a later protocol is refused with both sides' versions and the side to upgrade."""
    with RawClient(server.address, "raw-future") as client, pytest.raises(grpc.RpcError) as failed:
        client.register(protocol=coordinator_pb2.ProtocolRange(min=7, max=9))
    assert failed.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert failed.value.details() == (
        "no protocol version in common: the client supports 7 to 9, the coordinator 1 to 1; upgrade the coordinator"
    )


@pytest.mark.parametrize("client_id", ["", "../etc", "-rf", "a" * 65, "a b"])
def test_a_name_that_is_no_id_is_refused(server: Coordinator, client_id: str) -> None:
    """Ids become file names and options. An ambiguous id is refused with the rule."""
    with RawClient(server.address, client_id) as client, pytest.raises(grpc.RpcError) as failed:
        client.register()
    assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "client_id: expected 1 to 64 of A-Z a-z 0-9 . _ -" in str(failed.value.details())


def test_an_unknown_session_has_to_register(server: Coordinator) -> None:
    """The coordinator does not know the session, as after a restart."""
    with RawClient(server.address) as client, pytest.raises(grpc.RpcError) as failed:
        client.attend()
    assert failed.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert failed.value.details() == "no session of this id is open: register again"


def test_an_unknown_resource_is_refused(server: Coordinator) -> None:
    """An unknown digest and an invalid digest are refused."""
    with RawClient(server.address, "raw-lost") as client:
        client.register()
        with pytest.raises(grpc.RpcError, match="is being sent out: its round is over; wait for a new assignment"):
            client.fetch(tensor_pb2.Resource(digest=digest_message(digest_of(b"?"))))
        with pytest.raises(grpc.RpcError, match="digest: expected a BLAKE3-256 digest"):
            client.fetch(tensor_pb2.Resource())


def test_an_upload_without_a_header_is_refused(server: Coordinator) -> None:
    """A stream that begins with bytes and an empty stream are refused."""
    with RawClient(server.address, "raw-rude") as client:
        client.register()
        trailer = coordinator_pb2.SubmitUpdateRequest(trailer=training_pb2.UpdateTrailer())
        for stream, came in (([trailer], "trailer"), ([], "nothing")):
            with pytest.raises(grpc.RpcError, match=f"part: expected a header first, got {came}"):
                client.stub.SubmitUpdate(iter(stream), timeout=60)
