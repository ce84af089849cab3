"""Every field of what a coordinator pushes, at the extremes of its type: only the daemon's own errors come of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from fl_client import answers
from fl_client.assignments.checks import check_assignment, check_resources, checked_key
from fl_client.assignments.clock import seconds_for
from fl_client.config import LimitsConfig
from fl_client.connection.pace import Pace
from fl_client.connection.reading import (
    UnreadableMessage,
    asked_for,
    check_registration,
    parsed,
    seconds_of,
    text,
)
from fl_client.desk import Desk
from fl_client.errors import ClientError
from fl_client.link import Link, Waits
from fl_client.metrics import Metrics
from fl_client.updates import work_of
from protos.digests import digest_message
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from tests.hostile.extremes import extremes

LIMITS = LimitsConfig()
KEY = training_pb2.ExchangeKey(run_id="run", round=3)
RESOURCE = tensor_pb2.Resource(kind=1, digest=digest_message(bytes(32)), size_bytes=8, encoding=1)
ASSIGNMENT = training_pb2.Assignment(
    key=KEY,
    task="tiny",
    resources=[RESOURCE],
    training=training_pb2.LocalTraining(
        algorithm=training_pb2.AlgorithmSpec(name="fedavg"), learning_rate=0.1, local_epochs=1, batch_size=4, seed=1
    ),
    payloads=[training_pb2.PAYLOAD_KIND_DELTA],
    counted=training_pb2.Outcome(key=KEY, digest=digest_message(bytes(32)), counted=True, clip_factor=1.0),
)
EVALUATION = training_pb2.EvaluationAssignment(key=KEY, task="tiny", resources=[RESOURCE])
EVENTS = [
    pb.AttendResponse(assignment=ASSIGNMENT),
    pb.AttendResponse(evaluation=EVALUATION),
    pb.AttendResponse(outcome=ASSIGNMENT.counted),
    pb.AttendResponse(cancel=pb.Cancel(key=KEY)),
    pb.AttendResponse(run_ended=pb.RunEnded(run_id="run")),
]


@pytest.mark.parametrize("base", [ASSIGNMENT, training_pb2.Assignment()], ids=["whole", "empty"])
def test_an_extreme_assignment_is_refused_by_name_or_can_be_done(base):
    """Whatever a field says: it is refused by an error of the daemon's own, or what is left to do is within limits."""
    refused = []
    for assignment in extremes(base):
        assert 0 < seconds_for(assignment, LIMITS.max_seconds) <= LIMITS.max_seconds
        assert len(work_of(assignment)) == 32
        try:
            checked_key(assignment.key)
            check_assignment(assignment, LIMITS, 100)
            answers.exchange_of(assignment, answers.method_of(assignment.training))
        except ClientError as error:
            refused.append(len(str(error)))
    assert len(refused) > 20
    assert max(refused) < 100_000


def test_an_extreme_evaluation_is_refused_by_name_or_can_be_done():
    """As of training: its key and resources, and a deadline of any length."""
    for assignment in extremes(EVALUATION):
        assert 0 < seconds_for(assignment, 10.0) <= 10.0
        try:
            checked_key(assignment.key)
            check_resources(assignment.resources)
        except ClientError:
            continue
        assert len(assignment.resources) <= 3


class Untiring(asyncio.TaskGroup):
    """Does nothing of what it is given."""

    def create_task(self, coroutine, **_):
        coroutine.close()
        return SimpleNamespace(cancel=lambda: None, add_done_callback=lambda done: None)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.WhichOneof("event"))
async def test_a_desk_takes_every_extreme_event(event):
    """None of them raises, and no more work than allowed is begun, whatever the keys."""
    metrics = Metrics()
    tools = SimpleNamespace(
        link=Link(Waits()), gatekeeper=None, disk=None, metrics=metrics,
        progress=SimpleNamespace(say=lambda what: None),
        shelf=SimpleNamespace(drop=None, settle=None, end=None), limits=LIMITS,
    )  # fmt: skip
    desk = Desk(tools, Untiring())
    desk.attached()
    for each in extremes(event):
        desk.take(each)
    assert len(desk._training) + len(desk._evaluating) <= 2 * LIMITS.max_assignments
    assert metrics.registry.get_sample_value("fl_client_events_ignored_total") > 0


def test_an_extreme_registration_is_refused_by_name_or_names_a_session():
    """Only what was asked about is taken from it."""
    request = pb.RegisterRequest(
        protocol=pb.ProtocolRange(min=1, max=1), pending=[KEY], states=[pb.HeldState(run_id="run")]
    )
    base = pb.RegisterResponse(session_id="s", protocol=1, outcomes=[ASSIGNMENT.counted], ended_runs=["run"])
    assert len(asked_for(base, request)) == 2
    for response in extremes(base):
        assert len(asked_for(response, request)) <= 2
        try:
            check_registration(response, request)
        except ClientError:
            continue
        assert (response.protocol, len(response.session_id) <= 256) == (1, True)


@given(st.binary(max_size=200))
def test_bytes_are_read_or_are_not(raw):
    """Bytes of any kind are a message or an UnreadableMessage."""
    for kind in (pb.AttendResponse, pb.RegisterResponse, pb.FetchModelResponse, pb.SubmitUpdateResponse):
        try:
            assert isinstance(parsed(raw, kind), kind)
        except UnreadableMessage:
            continue


def test_a_message_is_measured_before_it_is_parsed():
    """Two bytes of the wire are an object in memory each."""
    raw = pb.RegisterResponse(ended_runs=[""] * 200_000).SerializeToString()
    with pytest.raises(UnreadableMessage, match="at most 262144 bytes, got 400000"):
        parsed(raw, pb.RegisterResponse)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1))
def test_any_duration_is_a_number_of_seconds(seconds, nanos):
    """As a float; protobuf's own conversion raises beyond some thousand years."""
    assert seconds_of(Duration(seconds=seconds, nanos=nanos)) == seconds + nanos / 1e9


@given(st.text())
def test_text_for_the_log_can_be_printed(words):
    """No line end, escape sequence or change of direction is left in it."""
    assert text(words).isprintable()


def test_a_pace_lets_so_many_through_at_once_and_so_many_a_second():
    """Three at once, then one every half second; time without any is not saved up beyond that."""
    now = [100.0]
    pace = Pace(2.0, 3, lambda: now[0])
    assert [pace.delay() for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 1.0]
    now[0] += 1000.0
    assert [pace.free() for _ in range(5)] == [True, True, True, False, False]
    now[0] += 0.5
    assert [pace.free() for _ in range(2)] == [True, False]
