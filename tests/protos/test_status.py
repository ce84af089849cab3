"""Error details are sent in trailing metadata, and unknown details are ignored."""

from __future__ import annotations

import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.status_pb2 import Status

from protos.fl.v1 import errors_pb2
from protos.fl.v1.tensor_pb2 import Chunk
from protos.status import STATUS_DETAILS_KEY, detail_of, status_metadata

NAMES = sorted(errors_pb2.DESCRIPTOR.message_types_by_name)
ABORTED = 10


@pytest.mark.parametrize("name", NAMES)
def test_every_error_comes_back(name: str) -> None:
    """Every message of errors.proto arrives as it was sent."""
    detail = getattr(errors_pb2, name)()
    assert detail_of(status_metadata(ABORTED, "", detail)) == detail


def test_the_status_holds_code_message_and_detail() -> None:
    """The metadata has google.rpc.Status under the reserved key, which grpc libraries of other languages read."""
    detail = errors_pb2.RetryLater(wait=Duration(seconds=3))
    ((key, value),) = status_metadata(ABORTED, "wait 3 s", detail)
    status = Status.FromString(value)
    assert key == "grpc-status-details-bin"
    assert (status.code, status.message) == (ABORTED, "wait 3 s")
    assert status.details[0].type_url == "type.googleapis.com/fl.v1.RetryLater"


def test_other_metadata_does_not_disturb() -> None:
    """The detail is found behind other entries."""
    detail = errors_pb2.UnknownRun(run_id="r1")
    assert detail_of([("x", "y"), *status_metadata(ABORTED, "", detail)]) == detail


def with_detail(message: Message) -> list[tuple[str, bytes]]:
    """Metadata with any message as its only detail."""
    status = Status()
    status.details.add().Pack(message)
    return [(STATUS_DETAILS_KEY, status.SerializeToString())]


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        [("x", "y")],
        status_metadata(ABORTED, "no detail", None),
        with_detail(Duration(seconds=1)),
        with_detail(Chunk(offset=1)),
        [(STATUS_DETAILS_KEY, b"\xff\xff")],
        [(STATUS_DETAILS_KEY, b"\x1a\x02\xff\xff")],
    ],
    ids=["none", "empty", "other key", "no detail", "not ours", "ours, no error", "garbage", "garbage inside"],
)
def test_without_a_known_detail_there_is_none(metadata: list[tuple[str, str | bytes]] | None) -> None:
    """A reader falls back on the status code."""
    assert detail_of(metadata) is None


def test_a_detail_with_broken_bytes_is_none() -> None:
    """A known type with invalid bytes counts as no detail."""
    status = Status()
    status.details.add(type_url="type.googleapis.com/fl.v1.UnknownRun", value=b"\x0a\xff")
    assert detail_of([(STATUS_DETAILS_KEY, status.SerializeToString())]) is None


@pytest.mark.parametrize("name", ["fl.v1.RetryLater\0", "fl.v1.\0", "\0", "fl.v1.RetryLater.Wait", ""])
def test_an_unknown_name_is_no_detail(name: str) -> None:
    """This holds for any content, also a NUL."""
    status = Status(code=14, details=[Any(type_url=f"type.googleapis.com/{name}")])
    assert detail_of(((STATUS_DETAILS_KEY, status.SerializeToString()),)) is None
