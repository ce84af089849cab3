"""Every field of a coordinator's messages at the extremes of its type: only the daemon's own errors are raised."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from fl_client.assignments.checks import check_assignment, check_resources, checked_key
from fl_client.assignments.deadline import seconds_for
from fl_client.assignments.executor import Services
from fl_client.assignments.manager import AssignmentManager
from fl_client.assignments.releases import MOST_MODELS
from fl_client.connection.link import Link, RetryDelays
from fl_client.connection.messages import InvalidMessage, log_text, parse, seconds_of
from fl_client.connection.session import check_registration, requested_events
from fl_client.errors import ClientError
from fl_client.monitoring.metrics import Metrics
from fl_client.settings.config import LimitsConfig
from fl_client.storage.pending_updates import work_digest
from fl_client.training import payloads
from protos.digests import digest_message
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from tests.hostile.extremes import extremes

LIMITS = LimitsConfig()
KEY = training_pb2.ExchangeKey(run_id="run", round=3)
RESOURCE = tensor_pb2.Resource(
    kind=tensor_pb2.RESOURCE_KIND_MODEL,
    digest=digest_message(bytes(32)),
    size_bytes=8,
    encoding=tensor_pb2.ENCODING_PLAIN,
)
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
    pb.AttendResponse(release=pb.ReleaseOrder(model="digits", version=1, description=b"{}", signature=bytes(64))),
    pb.AttendResponse(
        stage=training_pb2.StageMessage(key=KEY, stage=training_pb2.SECURE_STAGE_SHARES, content=b"keys")
    ),
]


@pytest.mark.parametrize("base", [ASSIGNMENT, training_pb2.Assignment()], ids=["whole", "empty"])
def test_an_extreme_assignment_is_refused_by_name_or_can_be_done(base: training_pb2.Assignment) -> None:
    """Any value of a field is refused with one of the daemon's errors, or the work is within the limits."""
    refused = []
    for assignment in extremes(base):
        assert 0 < seconds_for(assignment, LIMITS.max_seconds) <= LIMITS.max_seconds
        assert len(work_digest(assignment)) == 32
        try:
            checked_key(assignment.key)
            check_assignment(assignment, LIMITS, 100)
            payloads.exchange_of(assignment, payloads.method_of(assignment.training))
        except ClientError as error:
            refused.append(len(str(error)))
    assert len(refused) > 20
    assert max(refused) < 100_000


def test_an_extreme_evaluation_is_refused_by_name_or_can_be_done() -> None:
    """As for training: key, resources, and a deadline of any length."""
    for assignment in extremes(EVALUATION):
        assert 0 < seconds_for(assignment, 10.0) <= 10.0
        try:
            checked_key(assignment.key)
            check_resources(assignment)
        except ClientError:
            continue
        assert len(assignment.resources) <= 3


class IdleTaskGroup(asyncio.TaskGroup):
    """A task group that runs no task."""

    def create_task(self, coro: Any, **_: Any) -> Any:
        coro.close()
        return SimpleNamespace(cancel=lambda: None, add_done_callback=lambda done: None)


def extremes_of(event: pb.AttendResponse) -> Iterator[pb.AttendResponse]:
    """The event with one field at an extreme. Only the empty event gets fields of every kind, which replace its own."""
    if (kind := event.WhichOneof("event")) is None:
        yield from extremes(event)
        return
    for changed in extremes(getattr(event, kind)):
        yield pb.AttendResponse(**{kind: changed})


@pytest.mark.parametrize(
    "event", [*EVENTS, pb.AttendResponse()], ids=lambda event: event.WhichOneof("event") or "empty"
)
async def test_every_extreme_event_is_handled(event: pb.AttendResponse) -> None:
    """No event raises, and no more work than allowed is started, with any keys."""
    metrics = Metrics()
    services = SimpleNamespace(
        link=Link(RetryDelays()), availability=None, disk=None, state=None, metrics=metrics,
        progress=SimpleNamespace(show=lambda activity: None),
        storage=SimpleNamespace(drop=None, settle=None, end_run=None), limits=LIMITS,
        audit=SimpleNamespace(note=lambda *_: None), secure=SimpleNamespace(forget=lambda key: None),
        packages=None, released=SimpleNamespace(),
    )  # fmt: skip
    manager = AssignmentManager(cast(Services, services), IdleTaskGroup())
    manager.attached()
    for extreme in extremes_of(event):
        manager.handle(extreme)
    assert len(manager._training) + len(manager._evaluating) <= 2 * LIMITS.max_assignments
    assert len(manager._releases._running) <= MOST_MODELS
    assert metrics.registry.get_sample_value("fl_client_events_ignored_total")


def test_an_extreme_registration_is_refused_by_name_or_names_a_session() -> None:
    """Only outcomes and runs that were requested are used."""
    request = pb.RegisterRequest(
        protocol=pb.ProtocolRange(min=1, max=1), pending=[KEY], states=[pb.HeldState(run_id="run")]
    )
    base = pb.RegisterResponse(session_id="s", protocol=1, outcomes=[ASSIGNMENT.counted], ended_runs=["run"])
    assert len(requested_events(base, request)) == 2
    for response in extremes(base):
        assert len(requested_events(response, request)) <= 2
        try:
            check_registration(response, request)
        except ClientError:
            continue
        assert (response.protocol, len(response.session_id) <= 256) == (1, True)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    """Any bytes are a message or an InvalidMessage."""
    for kind in (pb.AttendResponse, pb.RegisterResponse, pb.FetchModelResponse, pb.SubmitUpdateResponse):
        try:
            assert isinstance(parse(raw, kind), kind)
        except InvalidMessage:
            continue


def test_a_message_is_measured_before_it_is_parsed() -> None:
    """Two bytes of the wire become an object in memory."""
    raw = pb.RegisterResponse(ended_runs=[""] * 200_000).SerializeToString()
    with pytest.raises(InvalidMessage, match="at most 262144 bytes, got 400000"):
        parse(raw, pb.RegisterResponse)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1))
def test_any_duration_is_a_number_of_seconds(seconds: int, nanos: int) -> None:
    """It is converted to a float. Protobuf's own conversion raises beyond some thousand years."""
    assert seconds_of(Duration(seconds=seconds, nanos=nanos)) == seconds + nanos / 1e9


def test_text_for_the_log_can_be_printed() -> None:
    """For every Unicode character no line end, escape sequence or change of direction is left."""
    text = "".join(map(chr, range(sys.maxunicode + 1)))
    assert log_text(text, len(text)).isprintable()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip": -1.0}, "clip: expected a number over 0, got -1.0"),
        ({"clip": float("nan")}, "clip: expected a number over 0, got nan"),
        ({"clip": 1.0, "upload_encodings": [tensor_pb2.ENCODING_INT8]}, "clip: expected the encoding PLAIN"),
        ({"clip": 1.0, "payloads": [training_pb2.PAYLOAD_KIND_FULL_GRADIENT]}, "clip: expected the delta as the only"),
    ],
)
def test_a_clip_that_would_not_bound_the_update_is_refused(changes: dict[str, Any], words: str) -> None:
    """The device names what is wrong; a usual clip is accepted."""
    assignment = training_pb2.Assignment()
    assignment.CopyFrom(ASSIGNMENT)
    assignment.clip = 1.0
    check_assignment(assignment, LIMITS, 100)
    assignment.MergeFrom(training_pb2.Assignment(**changes))
    with pytest.raises(ClientError, match=words):
        check_assignment(assignment, LIMITS, 100)
