"""Counting what is in a request before protobuf builds it."""

from __future__ import annotations

import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from fl_server.rpc.wire_count import MOST_NESTED, Malformed, count_values, nested_of
from protos.fl.v1 import admin_pb2, coordinator_pb2, tensor_pb2, training_pb2

REGISTER = nested_of(coordinator_pb2.RegisterRequest.DESCRIPTOR)
SUBMIT = nested_of(coordinator_pb2.SubmitUpdateRequest.DESCRIPTOR)
CREATE = nested_of(admin_pb2.CreateRunRequest.DESCRIPTOR)
MOST = 1000


def counted(message, nested):
    """Without a limit that matters."""
    return count_values(message.SerializeToString(), nested, 10**9)


def test_each_field_of_each_message_is_one():
    """Three pending keys with two fields each, and a name."""
    keys = [training_pb2.ExchangeKey(run_id="r", round=number + 1) for number in range(3)]
    assert counted(coordinator_pb2.RegisterRequest(client_id="a", pending=keys), REGISTER) == 1 + 3 * 3


def test_a_packed_field_counts_by_its_elements():
    """Sizes of a tensor, each of which takes eight bytes in memory."""
    tensor = tensor_pb2.TensorSpec(name="w", shape=[1] * 50)
    header = training_pb2.UpdateHeader(payloads=[training_pb2.Payload(manifest={"tensors": [tensor]})])
    assert counted(coordinator_pb2.SubmitUpdateRequest(header=header), SUBMIT) == 6 + 50


def test_map_entries_count():
    """A label is an entry with a key and a value."""
    assert counted(coordinator_pb2.RegisterRequest(labels={"a": "b", "c": "d"}), REGISTER) == 6


def test_the_count_stops_at_the_limit():
    """Whatever comes behind is not looked at: not even whether it is a message."""
    assert count_values(b"\x42\x00" * 5000 + b"\xff", REGISTER, MOST) == MOST + 1


def test_deep_nesting_is_refused():
    """Before protobuf or our own code would recurse."""
    deep = Struct()
    inner = deep
    for _ in range(25):
        inner = inner.get_or_create_struct("a")
    spec = admin_pb2.RunSpec(task={"options": deep})
    with pytest.raises(Malformed, match=f"nested more than {MOST_NESTED} deep"):
        counted(admin_pb2.CreateRunRequest(spec=spec), CREATE)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"\xff\xff\xff", "torn at byte 0"),
        (b"\x0a", "torn at byte 1"),
        (b"\x0a\x05ab", "inside a field"),
        (b"\x09abc", "inside a field"),
        (b"\x42\x02\x0a\x05", "inside a field"),
        (b"\x0b\x0c", "wire type 3"),
        (b"\x0f", "wire type 7"),
    ],
)
def test_what_is_torn_is_told(message, words):
    """With the place."""
    with pytest.raises(Malformed, match=words):
        count_values(message, REGISTER, MOST)


@given(st.binary(max_size=200))
def test_any_bytes_are_counted_or_refused(message):
    """Nothing else is raised, and there are never more values than bytes."""
    try:
        count = count_values(message, REGISTER, MOST)
    except Malformed:
        return
    assert count <= len(message)
