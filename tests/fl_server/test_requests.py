"""Limits of requests: every method has some, and what is refused is told in a line."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pool

from fl_server.registration import MAX_ENTRIES
from fl_server.rpc.requests import LARGE_BYTES, LIMITS, NESTED, BadRequest, parse
from protos.fl.v1 import admin_pb2
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, TaskFingerprint

REGISTER = "/fl.v1.Coordinator/Register"


def test_every_method_that_is_served_has_limits():
    """Of both services, health and reflection: the table has no other."""
    names = ("fl.v1.Coordinator", "fl.v1.Admin", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
    pool = descriptor_pool.Default()
    services = [pool.FindServiceByName(name) for name in names]
    methods = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert set(LIMITS) == set(NESTED) == methods


def test_the_largest_honest_registration_is_taken():
    """As many labels, tasks, keys and states as the fleet takes, each with the longest texts."""
    words = ["x" * 252 + f"{number:04}" for number in range(64)]
    request = pb.RegisterRequest(
        client_id="c" * 64,
        labels={word: word for word in words},
        tasks=[
            pb.TaskOffer(
                name=word, fingerprint=TaskFingerprint(version=word, source=word), train_examples=9, eval_examples=9
            )
            for word in words
        ],
        pending=[ExchangeKey(run_id="r" * 64, round=9999, exchange=1)] * MAX_ENTRIES["pending"],
        states=[pb.HeldState(run_id="r" * 64, state_epoch=7)] * MAX_ENTRIES["states"],
    )
    assert parse(REGISTER, request.SerializeToString(), pb.RegisterRequest.FromString) == request


@pytest.mark.parametrize(
    ("raw", "why", "words"),
    [
        (b"\x0a" + b"x" * (512 << 10), "size", "at most 524288 bytes in Register; send less, got 524289 bytes"),
        (b"\x42\x00" * 10_001, "values", "at most 10000 values in Register; send fewer entries, got more"),
        (b"\x0a\x02\xff\xfe", "malformed", "bytes that protobuf cannot parse"),
        (b"\xff\xff\xff", "malformed", "bytes that protobuf cannot parse"),
        (b"\x0b" * 20_000, "malformed", "wire type 3"),
    ],
)
def test_what_is_refused_is_told_in_a_line(raw, why, words):
    """By size, by values, or as no message; a large one is known as such."""
    with pytest.raises(BadRequest) as caught:
        parse(REGISTER, raw, pb.RegisterRequest.FromString)
    assert (caught.value.why, caught.value.is_large) == (why, len(raw) > LARGE_BYTES)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_request_that_is_short_enough_is_parsed_without_a_count():
    """It cannot have more values than bytes."""
    raw = admin_pb2.GetRunRequest(run_id="r").SerializeToString()
    assert parse("/fl.v1.Admin/GetRun", raw, admin_pb2.GetRunRequest.FromString).run_id == "r"
