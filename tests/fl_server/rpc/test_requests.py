"""Limits of requests: every method has some, and a refusal is one line."""

from __future__ import annotations

import pytest

from fl_server.clients.registration import MOST_ENTRIES
from fl_server.clients.sessions import MOST_ASKED, MOST_AUTHORITIES
from fl_server.rpc.call_limits import LARGE_BYTES, BadRequest, parse
from protos.fl.v1 import admin_pb2
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.training_pb2 import ExchangeKey, TaskFingerprint

REGISTER = "/fl.v1.Coordinator/Register"


def test_the_largest_valid_registration_is_accepted() -> None:
    """The highest numbers of labels, tasks, keys and states, each with the longest texts."""
    texts = ["x" * 252 + f"{number:04}" for number in range(MOST_ENTRIES)]
    request = pb.RegisterRequest(
        client_id="c" * 64,
        labels={text: text for text in texts},
        tasks=[
            pb.TaskOffer(
                name=text, fingerprint=TaskFingerprint(version=text, source=text), train_examples=9, eval_examples=9
            )
            for text in texts
        ],
        pending=[ExchangeKey(run_id="r" * 64, round=9999, exchange=1)] * MOST_ASKED,
        states=[pb.HeldState(run_id="r" * 64, state_epoch=7)] * MOST_ASKED,
    )
    assert parse(REGISTER, request.SerializeToString(), pb.RegisterRequest.FromString) == request


def test_the_most_questions_of_a_client_that_attends_are_accepted() -> None:
    """The highest numbers of pending keys and states, each with the longest name."""
    request = pb.AttendRequest(
        session_id="s" * 32,
        authorities=[b"\x01" * 32] * MOST_AUTHORITIES,
        pending=[ExchangeKey(run_id="r" * 64, round=9999, exchange=1)] * MOST_ASKED,
        states=[pb.HeldState(run_id="r" * 64, state_epoch=7)] * MOST_ASKED,
    )
    assert parse("/fl.v1.Coordinator/Attend", request.SerializeToString(), pb.AttendRequest.FromString) == request


@pytest.mark.parametrize(
    ("raw", "why", "message"),
    [
        (b"\x0a" + b"x" * (512 << 10), "size", "at most 524288 bytes in Register; send less, got 524289 bytes"),
        (b"\x42\x00" * 10_001, "values", "at most 10,000 values in Register; send fewer entries, got more"),
        (b"\x0a\x02\xff\xfe", "malformed", "bytes that protobuf cannot parse"),
        (b"\xff\xff\xff", "malformed", "bytes that protobuf cannot parse"),
        (b"\x0b" * 20_000, "malformed", "wire type 3"),
    ],
)
def test_a_refusal_is_one_line(raw: bytes, why: str, message: str) -> None:
    """By size, by the number of values, or as an invalid message; a large request is marked as such."""
    with pytest.raises(BadRequest) as caught:
        parse(REGISTER, raw, pb.RegisterRequest.FromString)
    assert (caught.value.why, caught.value.is_large) == (why, len(raw) > LARGE_BYTES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_request_that_is_short_enough_is_parsed_without_a_count() -> None:
    """It cannot have more values than bytes."""
    raw = admin_pb2.GetRunRequest(run_id="r").SerializeToString()
    assert parse("/fl.v1.Admin/GetRun", raw, admin_pb2.GetRunRequest.FromString).run_id == "r"
