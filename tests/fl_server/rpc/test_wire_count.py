"""The number of values in a request, counted before protobuf parses it."""

from __future__ import annotations

from typing import Any, cast

import pytest
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from fl_server.rpc.call_limits import MOST_NESTED, Malformed, Nested, count_values, nested_of
from protos.fl.v1 import admin_pb2, coordinator_pb2, tensor_pb2, training_pb2


def nested(kind: type[Message]) -> Nested:
    """The nested fields of a message type."""
    return nested_of(cast(Any, kind.DESCRIPTOR))  # protobuf's types have two classes of that name


REGISTER = nested(coordinator_pb2.RegisterRequest)
SUBMIT = nested(coordinator_pb2.SubmitUpdateRequest)
CREATE = nested(admin_pb2.CreateRunRequest)
MOST = 1000


def counted(message: Any, nested: Nested) -> int:
    """The count with a limit that is never reached."""
    return count_values(message.SerializeToString(), nested, 10**9)


def test_each_field_of_each_message_counts() -> None:
    """Three pending keys with two fields each, and a name."""
    keys = [training_pb2.ExchangeKey(run_id="r", round=number + 1) for number in range(3)]
    assert counted(coordinator_pb2.RegisterRequest(client_id="a", pending=keys), REGISTER) == 1 + 3 * 3


def test_a_packed_field_counts_by_its_elements() -> None:
    """Sizes of a tensor take eight bytes of memory each."""
    tensor = tensor_pb2.TensorSpec(name="w", shape=[1] * 50)
    header = training_pb2.UpdateHeader(payloads=[training_pb2.Payload(manifest={"tensors": [tensor]})])
    assert counted(coordinator_pb2.SubmitUpdateRequest(header=header), SUBMIT) == 6 + 50


def test_map_entries_count() -> None:
    """A label is an entry with a key and a value."""
    assert counted(coordinator_pb2.RegisterRequest(labels={"a": "b", "c": "d"}), REGISTER) == 6


def test_the_count_stops_at_the_limit() -> None:
    """Later bytes are not read, even if they are not a valid message."""
    assert count_values(b"\x42\x00" * 5000 + b"\xff", REGISTER, MOST) == MOST + 1


def test_deep_nesting_is_refused() -> None:
    """Before protobuf or other code recurses."""
    deep = Struct()
    inner = deep
    for _ in range(25):
        inner = inner.get_or_create_struct("a")
    spec = admin_pb2.RunSpec(task={"options": deep})
    with pytest.raises(Malformed, match=f"nested more than {MOST_NESTED} deep"):
        counted(admin_pb2.CreateRunRequest(spec=spec), CREATE)


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"\xff\xff\xff", "truncated at byte 0"),
        (b"\x0a", "truncated at byte 1"),
        (b"\x0a\x05ab", "inside a field"),
        (b"\x09abc", "inside a field"),
        (b"\x42\x02\x0a\x05", "inside a field"),
        (b"\x0b\x0c", "wire type 3"),
        (b"\x0f", "wire type 7"),
    ],
)
def test_truncated_messages_are_refused(raw: bytes, error: str) -> None:
    """The error has the position."""
    with pytest.raises(Malformed, match=error):
        count_values(raw, REGISTER, MOST)


@given(st.binary(max_size=200))
def test_any_bytes_are_counted_or_refused(raw: bytes) -> None:
    """No other error is raised, and there are never more values than bytes."""
    try:
        count = count_values(raw, REGISTER, MOST)
    except Malformed:
        return
    assert count <= len(raw)
