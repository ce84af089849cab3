"""A real daemon with a hostile coordinator: it stays up within its owner's limits and works correctly afterwards.

All tests share one daemon process. After each test it does a correct round for the same coordinator.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.status_pb2 import Status

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2, tensor_pb2, training_pb2
from tests.hostile.bad_coordinator import LARGE, Answer, BadCoordinator, Failure
from tests.hostile.extremes import extremes
from tests.hostile.federation import Memory
from tests.processes.federation import Daemon
from tests.processes.process import Workspace, eventually

RUNS = 3
"""limits.max_runs of the daemon."""
SLACK_MIB = 64
"""Largest growth of a daemon's memory under any of these attacks; its model has 172 bytes."""
LATER = Failure.of(grpc.StatusCode.UNAVAILABLE, errors_pb2.RetryLater(wait={"seconds": 2**60}))


Shared = tuple[Daemon, bytes]
"""The daemon, and the digest of its first proper round."""


@pytest.fixture(scope="module")
def coordinator() -> Iterator[BadCoordinator]:
    """One coordinator for all tests; the changes of a test are undone."""
    with BadCoordinator() as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A folder for the daemon."""
    with Workspace(tmp_path_factory.mktemp("bad")) as workspace:
        yield workspace


@pytest.fixture(scope="module")
def shared(workspace: Workspace, coordinator: BadCoordinator) -> Shared:
    """The daemon, and the digest of its first proper round."""
    limits = {"max_wait_s": 1.0, "max_runs": RUNS, "max_assignments": 4}
    daemon = Daemon(workspace, coordinator, "edge-1", options={"step_s": 0.001}, limits=limits).start()
    coordinator.until_attended(0)
    return daemon, coordinator.proper_round()


@pytest.fixture
def daemon(shared: Shared, coordinator: BadCoordinator) -> Iterator[Daemon]:
    """The shared daemon. After each test it is the same process and does the same round."""
    daemon, digest = shared
    pid, memory = daemon.pid, Memory(daemon.pid)
    memory.forget_peak()
    before = memory.now()
    yield daemon
    peak = memory.peak()
    coordinator.honest()
    assert coordinator.proper_round() == digest
    assert (daemon.exit_code, daemon.pid) == (None, pid)
    assert daemon.errors() == ""
    assert peak < before + SLACK_MIB


def nul_in_a_name() -> Failure:
    """RetryLater's name with a NUL behind it."""
    packed = AnyMessage(type_url="type.googleapis.com/fl.v1.RetryLater\0")
    return Failure(grpc.StatusCode.UNAVAILABLE, Status(code=14, details=[packed]).SerializeToString())


REGISTRATIONS: dict[str, Answer] = {
    "a wait of 2^60 s": LATER,
    "a wait that is negative and long": Failure.of(
        grpc.StatusCode.UNAVAILABLE, errors_pb2.RetryLater(wait={"seconds": -(2**62), "nanos": -(2**31)})
    ),
    "a NUL in a detail's type name": nul_in_a_name(),
    "details that are none": Failure(grpc.StatusCode.UNAVAILABLE, b"\xff\xff"),
    "bytes that are no message": b"\xff\xff\xff",
    "no session": pb.RegisterResponse(protocol=1).SerializeToString(),
    "a session of 200,000 characters": pb.RegisterResponse(protocol=1, session_id="x" * 200_000).SerializeToString(),
    "two million ended runs": b"\x32\x00" * 2_000_000,
    "two million outcomes": b"\x2a\x00" * 2_000_000,
}


def _always(answer: Answer) -> Callable[[Any], Answer]:
    return lambda request: answer


@pytest.mark.slow
def test_no_registration_response_ends_the_daemon(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """The daemon registers again after each of them."""
    for answer in REGISTRATIONS.values():
        coordinator.answers["Register"] = _always(answer)
        seen = coordinator.count("Register")
        coordinator.end(Failure.of(grpc.StatusCode.UNAUTHENTICATED, errors_pb2.UnknownSession()))
        coordinator.until_more("Register", seen)
        coordinator.honest()
        streams = coordinator.streams
        coordinator.until_attended(streams)


@pytest.mark.slow
def test_a_negative_retry_time_counts_as_none(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """A negative retry time counts as none: the daemon waits by its own backoff, ten tries take some seconds."""
    coordinator.answers["Register"] = lambda request: Failure.of(
        grpc.StatusCode.UNAVAILABLE, errors_pb2.RetryLater(wait={"seconds": -60})
    )
    coordinator.end(Failure.of(grpc.StatusCode.UNAUTHENTICATED, errors_pb2.UnknownSession()))
    before = coordinator.count("Register")
    coordinator.until_more("Register", before)
    ends = time.monotonic() + 3.0
    eventually(lambda: time.monotonic() > ends, "three seconds")
    assert coordinator.count("Register") - before <= 15


@pytest.mark.parametrize("wait", [2**60, -60])
def test_the_wait_of_a_stream_is_bounded(daemon: Daemon, coordinator: BadCoordinator, wait: float) -> None:
    """For a retry time in 36 billion years or in the past, the daemon reconnects after its own longest wait."""
    seen = coordinator.streams
    coordinator.push(pb.AttendResponse(retry=pb.RetryWindow(wait={"seconds": wait}, reason="\x1b[2J" * 100)))
    coordinator.hang_up()
    coordinator.until_attended(seen)


def test_no_byte_of_another_model_is_fetched(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """700 MiB for a model of 172 bytes are refused before any fetch."""
    assignment = coordinator.assignment("large")
    assignment.resources[0].size_bytes = LARGE
    assignment.resources[0].digest.value = bytes(32)
    sent = coordinator.bytes_sent
    coordinator.push(pb.AttendResponse(assignment=assignment))
    failure = coordinator.failed("large")
    assert failure.reason == pb.FAILURE_REASON_LAYOUT
    assert f"expected 172 bytes for the model here, got {LARGE}" in failure.message
    assert coordinator.bytes_sent == sent


@pytest.mark.slow
def test_a_stalled_download_is_abandoned(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """The first 100 bytes again and again are no progress: retries become rare, and the deadline ends them."""
    assignment = coordinator.assignment("again")
    assignment.resources[0].CopyFrom(coordinator.other_model())
    assignment.deadline.FromSeconds(2)
    seen = coordinator.count("FetchModel")
    coordinator.cut_at = 100
    coordinator.push(pb.AttendResponse(assignment=assignment))
    assert coordinator.failed("again").message.startswith("the deadline is over")
    assert 1 < coordinator.count("FetchModel") - seen < 15


def test_more_steps_than_allowed_are_not_begun(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """4e9 steps, or epochs, and a batch of everything are refused by the owner's limits, whatever the deadline."""
    for name, changes in {
        "steps": training_pb2.LocalTraining(local_steps=4_000_000_000),
        "epochs": training_pb2.LocalTraining(local_epochs=4_000_000_000),
    }.items():
        assignment = coordinator.assignment(name)
        assignment.training.MergeFrom(changes)
        assignment.deadline.seconds = 2**60
        coordinator.push(pb.AttendResponse(assignment=assignment))
        failure = coordinator.failed(name)
        assert failure.reason == pb.FAILURE_REASON_RESOURCES
        assert "limits.max_steps" in failure.message


def test_training_stops_at_its_deadline(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """The allowed number of steps takes hours. With a deadline of one second the daemon stops and reports that."""
    assignment = coordinator.assignment("long")
    assignment.training.local_steps = 10_000_000
    assignment.deadline.FromSeconds(1)
    coordinator.push(pb.AttendResponse(assignment=assignment))
    failure = coordinator.failed("long")
    assert (failure.reason, failure.message[:20]) == (pb.FAILURE_REASON_RESOURCES, "the deadline is over")


@pytest.mark.slow
def test_thousands_of_assignments_a_second_do_not_block_the_daemon(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """While a stream floods it, the daemon continues to report failures, many per call."""
    like = coordinator.assignment("flood")
    like.training.learning_rate = -1.0
    like.traceparent = "x" * 20_000  # what the transport holds is not many events
    sent = 0

    def flood() -> Iterator[bytes]:
        nonlocal sent
        while coordinator.flood is not None:
            sent += 1
            like.key.round = sent
            yield pb.AttendResponse(assignment=like).SerializeToString()

    coordinator.flood = flood
    before = coordinator.count("ReportStatus")
    seen = coordinator.count("Attend")
    coordinator.hang_up()
    coordinator.until_attended(seen)
    eventually(lambda: sent > 3000, "a flood")
    now = coordinator.count("ReportStatus")
    coordinator.until_more("ReportStatus", now + 5)
    assert len(daemon.events("assignment", run="flood")) < sent
    assert coordinator.count("ReportStatus") - before < sent / 20
    assert max(len(request.failures) for _, request in coordinator.calls["ReportStatus"]) > 1


def test_valid_work_in_a_flood_is_bounded(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """Of fifty long assignments of different runs the oldest are given up, and four remain."""
    events = []
    for number in range(50):
        assignment = coordinator.assignment(f"busy-{number}")
        assignment.training.local_steps = 1_000_000
        events.append(pb.AttendResponse(assignment=assignment))
    coordinator.push(*events)
    for number in range(46):
        assert "at most 4 assignments at once" in coordinator.failed(f"busy-{number}").message
    for number in range(46, 50):
        coordinator.push(pb.AttendResponse(run_ended=pb.RunEnded(run_id=f"busy-{number}")))


@pytest.mark.slow
def test_repeated_messages_do_not_fill_the_log(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """Three thousand notices and drains of 10,000 characters with escape sequences: less than 2 MB of log."""
    before = daemon._out.stat().st_size
    notice = pb.AttendResponse(notice=pb.Notice(text="\x1b[2J" + "x" * 10_000)).SerializeToString()
    drain = pb.AttendResponse(drain=pb.Drain(reason="\x1b]0;" + "y" * 10_000)).SerializeToString()
    coordinator.push(*[notice, drain] * 1500)
    assert coordinator.proper_round()
    assert daemon._out.stat().st_size - before < 2_000_000
    assert "\x1b" not in daemon._out.read_text()


def _answered(coordinator: BadCoordinator, run: str) -> bool:
    return (run, 0) in coordinator.updates.keys() | coordinator.failures().keys()


def test_states_of_many_runs_do_not_fill_the_disk(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """A method with client states in ten runs: three are kept, the others refused, and ended runs free their places."""
    for number in range(10):
        coordinator.push(pb.AttendResponse(assignment=coordinator.assignment(f"state-{number}", algorithm="scaffold")))
        eventually(partial(_answered, coordinator, f"state-{number}"), f"an answer of run {number}")
    refused = {run for run, _ in coordinator.failures() if run.startswith("state-")}
    assert refused == {f"state-{number}" for number in range(RUNS, 10)}
    assert "limits.max_runs" in coordinator.failed("state-9").message
    coordinator.push(*[pb.AttendResponse(run_ended=pb.RunEnded(run_id=f"state-{number}")) for number in range(RUNS)])
    coordinator.push(pb.AttendResponse(assignment=coordinator.assignment("state-10", algorithm="scaffold")))
    eventually(lambda: ("state-10", 0) in coordinator.updates, "a run can start again")
    coordinator.push(pb.AttendResponse(run_ended=pb.RunEnded(run_id="state-10")))


@pytest.mark.slow
def test_every_extreme_event_is_ignored_or_answered(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """Each field of each event at the extremes of its type, then invalid bytes, on one stream of one daemon."""
    assignment = coordinator.assignment("extreme")
    assignment.deadline.FromSeconds(1)
    assignment.counted.CopyFrom(training_pb2.Outcome(key=assignment.key, clip_factor=1.0))
    evaluation = training_pb2.EvaluationAssignment(
        key=assignment.key, task=assignment.task, fingerprint=assignment.fingerprint, resources=assignment.resources
    )
    evaluation.deadline.FromSeconds(1)
    bases = [
        pb.AttendResponse(assignment=assignment),
        pb.AttendResponse(evaluation=evaluation),
        pb.AttendResponse(outcome=assignment.counted),
        pb.AttendResponse(retry=pb.RetryWindow(wait={"seconds": 1})),
        pb.AttendResponse(cancel=pb.Cancel(key=assignment.key)),
        pb.AttendResponse(drain=pb.Drain(reason="x")),
        pb.AttendResponse(notice=pb.Notice(text="x")),
        pb.AttendResponse(run_ended=pb.RunEnded(run_id="extreme")),
        pb.AttendResponse(attached=pb.Attached()),
    ]
    for base in bases:
        coordinator.push(*[each.SerializeToString() for each in extremes(base) if each.WhichOneof("event")])
    coordinator.push(b"\xff\xff", b"", b"\x0a", bytes(300_000), struct.pack("<Q", 2**63))
    coordinator.push(pb.AttendResponse(run_ended=pb.RunEnded(run_id="extreme")))
    eventually(lambda: daemon.events("run_ended", run="extreme"), "the last event is taken")


def test_extreme_answers_to_uploads_end_nothing(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """After an empty receipt, one with another digest, or any wait, the update is dropped or sent again."""
    receipt = training_pb2.Receipt(detail="\x1b" * 100_000, reason=cast(training_pb2.RefusalReason, 99))
    answers: Iterator[Answer] = iter([
        LATER,
        Failure.of(grpc.StatusCode.RESOURCE_EXHAUSTED, errors_pb2.RetryLater(wait={"seconds": -1})),
        b"\xff",
        pb.SubmitUpdateResponse(receipt=receipt).SerializeToString(),
    ])  # fmt: skip
    coordinator.answers["SubmitUpdate"] = lambda header: next(answers)
    coordinator.answers["QueryUpload"] = lambda request: pb.QueryUploadResponse(
        kept_bytes=2**64 - 1
    ).SerializeToString()
    seen = coordinator.count("SubmitUpdate")
    coordinator.push(pb.AttendResponse(assignment=coordinator.assignment("upload")))
    coordinator.until_more("SubmitUpdate", seen + 3)
    eventually(lambda: daemon.events("update_refused", run="upload"), "the last answer is taken")


@pytest.mark.slow
def test_a_headers_size_is_checked_before_parsing(daemon: Daemon, coordinator: BadCoordinator) -> None:
    """A table of contents of two million empty tensors has 4 MB on the wire and needs hundreds in memory."""
    resource = coordinator.assignment("header").resources[0]
    manifest = tensor_pb2.Manifest.FromString(b"\x0a\x00" * 2_000_000)
    kept = coordinator.bundles[resource.digest.value]

    class Many:
        @staticmethod
        def to_manifest() -> tensor_pb2.Manifest:
            return manifest

    assignment = coordinator.assignment("header")
    assignment.resources[0].digest.value = bytes([1] * 32)
    assignment.deadline.FromSeconds(2)
    coordinator.bundles[bytes([1] * 32)] = (resource, Many(), kept[2])  # type: ignore[assignment]
    coordinator.push(pb.AttendResponse(assignment=assignment))
    assert "deadline" in coordinator.failed("header").message
