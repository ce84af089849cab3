"""A whole daemon against a real grpc server: its reaction to assignments, events and refusals."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from structlog.testing import capture_logs

from fl_client import daemon
from fl_client.assignments import hung_training
from fl_client.connection.link import RetryDelays
from fl_client.connection.reconnect import ReconnectPolicy
from fl_client.errors import Fenced
from protos import codec
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2, tensor_pb2, training_pb2
from tests.fl_client.fake_coordinator import FakeCoordinator
from tests.fl_client.fleet import Fleet


def values(update: tuple[training_pb2.UpdateHeader, bytes]) -> dict[str, torch.Tensor]:
    """The tensors of a received update."""
    header, data = update
    return codec.unpack(data, codec.Layout.from_manifest(header.payloads[0].manifest, 1 << 20))


async def test_an_assignment_becomes_an_update(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """From w = 0 the gradient mean(2x(wx - t)) is ((-4) + (-16))/2 = -10, so delta = 0.1; seen goes from 5 to 6."""
    async with fleet.daemon():
        coordinator.assign(coordinator.assignment())
        await coordinator.until(lambda: coordinator.calls["Attend"])
        await coordinator.until(lambda: coordinator.updates)
    header, _ = coordinator.updates[0]
    got = values(coordinator.updates[0])
    assert list(got) == ["w", "seen"]
    torch.testing.assert_close(got["w"], torch.tensor([0.1]))
    assert got["seen"] == 6
    assert (header.num_examples, header.num_steps, header.training_loss) == (2, 1, 10.0)


async def test_registration_describes_the_device(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """The first message has identity, task, fingerprint, examples, device and protocol."""
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
    (request,) = coordinator.calls["Register"]
    (offer,) = request.tasks
    assert (request.client_id, offer.name, offer.train_examples, offer.eval_examples) == ("edge-1", "tiny", 2, 2)
    assert request.device.kind == "cpu"
    assert request.protocol.min <= request.protocol.max


async def test_a_held_bundle_is_not_fetched_again(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """In two rounds from the same model, model and frozen part are fetched once each."""
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        for number in range(2):
            coordinator.assign(coordinator.assignment(number))
            await coordinator.until_called("admitted", number + 1)
    assert len(coordinator.calls["FetchModel"]) == 2


async def test_fedcm_uses_the_received_direction(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """alpha = 0.5, Delta = 4: d = 0.5 * (-10) + 0.5 * 4 = -3, so delta = 0.03."""
    assignment = coordinator.assignment(algorithm="fedcm")
    assignment.training.algorithm.parameters.update({"alpha": 0.5})
    direction = coordinator.publish(tensor_pb2.RESOURCE_KIND_DIRECTION, {"w": torch.tensor([4.0])}, {"w"})
    assignment.resources.append(direction)
    async with fleet.daemon():
        coordinator.outstanding.append(pb.AttendResponse(assignment=assignment))
        await coordinator.until(lambda: coordinator.updates)
    torch.testing.assert_close(values(coordinator.updates[0])["w"], torch.tensor([0.03]))


async def test_cancel_ends_training_in_the_middle(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """Cancel ends work with endless steps, and the next assignment is done."""
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0, local_steps=1 << 23))
        await asyncio.to_thread(fleet.task.started.wait)
        coordinator.push(cancel=pb.Cancel(key=training_pb2.ExchangeKey(run_id="run", round=0)))
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: coordinator.updates)
    assert list(coordinator.updates) == [1]
    assert daemon.count("rounds_trained_total") == 1


async def test_a_later_round_ends_the_training_of_an_earlier_one(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """The cancel did not arrive because the connection was cut. The next assignment shows that the round is over."""
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0, local_steps=1 << 23))
        await asyncio.to_thread(fleet.task.started.wait)
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: coordinator.updates)
    assert list(coordinator.updates) == [1]
    assert daemon.count("rounds_trained_total") == 1


async def test_unwanted_training_ends_with_the_next_registration(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """The registration asks for the outcome of an update in training. If that cannot count, the device is free."""
    other = coordinator.assignment(0, key=training_pb2.ExchangeKey(run_id="other"))
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0, local_steps=1 << 23))
        await asyncio.to_thread(fleet.task.started.wait)
        coordinator.outcomes.append(training_pb2.Outcome(key=coordinator.assignment(0).key, counted=False))
        coordinator.faults["Attend"].append(errors_pb2.UnknownSession())
        coordinator.hang_up()
        await coordinator.until(lambda: len(coordinator.calls["Register"]) == 2)
        coordinator.assign(other)
        await coordinator.until(lambda: coordinator.updates)
    assert list(coordinator.calls["Register"][1].pending) == [coordinator.assignment(0).key]
    assert daemon.count("rounds_trained_total") == 1


async def test_stopping_ends_training_and_is_reported(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """A daemon that is stopped during training reports STOPPING and ends with an idle thread."""
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0, local_steps=1 << 23))
        await asyncio.to_thread(fleet.task.started.wait)
        daemon.stop.set()
        assert await daemon.task is True
    (status,) = coordinator.calls["ReportStatus"]
    assert status.availability.reason == pb.UNAVAILABLE_REASON_STOPPING
    assert not coordinator.updates


async def test_a_step_that_does_not_end_does_not_keep_the_daemon(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """Stopped while a step hangs, the daemon ends and returns that its thread is not idle."""
    fleet.task.block = threading.Event()
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment())
        await asyncio.to_thread(fleet.task.started.wait)
        daemon.stop.set()
        assert await daemon.task is False
        fleet.task.block.set()


async def test_another_daemon_with_the_identity_does_not_end_this_one(
    fleet: Fleet, coordinator: FakeCoordinator
) -> None:
    """Fenced or refused because of another instance, the daemon logs what to do, waits, and works again."""
    coordinator.faults["Attend"].append(errors_pb2.SessionFenced(by_other_instance=True))
    coordinator.faults["Register"].append(None)
    coordinator.faults["Register"].append((errors_pb2.RetryLater(), grpc.StatusCode.ABORTED))
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment()))
    with capture_logs() as logs:
        async with fleet.daemon():
            await coordinator.until(lambda: coordinator.updates)
    errors = [(line["event"], line["todo"]) for line in logs if line["log_level"] == "error"]
    assert [event for event, _ in errors] == ["fenced", "identity_in_use"]
    assert all(todo.startswith("two daemons use one identity: end one of them") for _, todo in errors)


def test_the_waits_of_a_fenced_daemon_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """They double, up to ten times the longest wait. After a long session they start from the shortest."""
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    policy = ReconnectPolicy(RetryDelays())
    fenced = Fenced("another", by_other_instance=True)
    assert [policy.after(fenced, 1.0, was_registered=True) for _ in range(7)] == [
        15.0,
        30.0,
        60.0,
        120.0,
        240.0,
        480.0,
        600.0,
    ]
    assert policy.after(fenced, 3600.0, was_registered=True) == 15.0


@pytest.mark.parametrize(
    "detail",
    [
        errors_pb2.UnknownSession(),
        errors_pb2.SessionFenced(by_other_instance=False),
        errors_pb2.NotAllowed(needed="name edge-1"),
        errors_pb2.RetryLater(),
    ],
    ids=lambda detail: type(detail).__name__,
)
async def test_a_refused_stream_is_tried_again(fleet: Fleet, coordinator: FakeCoordinator, detail: Any) -> None:
    """After any other failure of Attend the daemon reconnects and works."""
    coordinator.faults["Attend"].append(detail)
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment()))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.updates)


async def test_no_common_protocol_is_tried_again(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """The daemon reconnects once the coordinator is upgraded."""
    coordinator.faults["Register"].append(errors_pb2.ProtocolMismatch())
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
    assert len(coordinator.calls["Register"]) == 2


async def test_evaluation_answers_with_the_task_s_metrics(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """w = 3 on (1, 2) and (2, 4): square errors 1 and 4, mean 2.5 over 2 examples."""
    model = {"w": torch.tensor([3.0]), "seen": torch.tensor(0)}
    resources = [
        coordinator.publish(tensor_pb2.RESOURCE_KIND_MODEL, model, {"w"}),
        coordinator.publish(tensor_pb2.RESOURCE_KIND_FROZEN, {"scale": torch.ones(())}, set()),
    ]
    like = coordinator.assignment()
    evaluation = training_pb2.EvaluationAssignment(
        key=like.key, task="tiny", fingerprint=like.fingerprint, resources=resources
    )
    async with fleet.daemon():
        coordinator.outstanding.append(pb.AttendResponse(evaluation=evaluation))
        await coordinator.until(lambda: coordinator.calls["ReportEvaluation"])
    (report,) = coordinator.calls["ReportEvaluation"]
    assert (report.num_examples, dict(report.metrics)) == (2, {"loss": 2.5})


def _other_layout(assignment: training_pb2.Assignment, coordinator: FakeCoordinator) -> None:
    del assignment.resources[0]
    model = {"w": torch.ones(2), "seen": torch.tensor(5)}
    assignment.resources.append(coordinator.publish(tensor_pb2.RESOURCE_KIND_MODEL, model, {"w"}))


def _other_fingerprint(assignment: training_pb2.Assignment, _: FakeCoordinator) -> None:
    assignment.fingerprint.version = "2"


def _no_algorithm(assignment: training_pb2.Assignment, _: FakeCoordinator) -> None:
    assignment.training.algorithm.name = "fedmagic"


def _no_parameter(assignment: training_pb2.Assignment, _: FakeCoordinator) -> None:
    assignment.training.algorithm.parameters.update({"warp": 9})


def _other_payload(assignment: training_pb2.Assignment, _: FakeCoordinator) -> None:
    assignment.payloads[:] = [training_pb2.PAYLOAD_KIND_FULL_GRADIENT]


def _huge_rate(assignment: training_pb2.Assignment, _: FakeCoordinator) -> None:
    assignment.training.learning_rate = 1e30
    assignment.training.local_steps = 5


def _other_task(assignment: training_pb2.Assignment, _: FakeCoordinator) -> None:
    assignment.task = "vision"


def _small_limit(assignment: training_pb2.Assignment, _: FakeCoordinator) -> None:
    assignment.max_update_bytes = 4


def _other_encoding(assignment: training_pb2.Assignment, _: FakeCoordinator) -> None:
    unknown: Any = 2
    assignment.resources[0].encoding = unknown


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (_other_layout, pb.FAILURE_REASON_LAYOUT, r"'w': expected shape \(1,\) float32, got \(2,\) float32"),
        (_other_fingerprint, pb.FAILURE_REASON_FINGERPRINT, r"version '2' sha256:tiny, got version '1' sha256:tiny"),
        (_no_algorithm, pb.FAILURE_REASON_UNSUPPORTED, "fedmagic"),
        (_no_parameter, pb.FAILURE_REASON_UNSUPPORTED, "warp"),
        (_other_payload, pb.FAILURE_REASON_UNSUPPORTED, "expected PAYLOAD_KIND_DELTA .* got PAYLOAD_KIND_FULL"),
        (_huge_rate, pb.FAILURE_REASON_NOT_FINITE, "expected a finite training loss"),
        (_other_task, pb.FAILURE_REASON_UNSUPPORTED, "expected task 'tiny', got 'vision'"),
        (_small_limit, pb.FAILURE_REASON_RESOURCES, "at most 4 bytes"),
        (_other_encoding, pb.FAILURE_REASON_UNSUPPORTED, "expected an encoding of plain .* got number 2"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_work_that_cannot_be_done_is_reported(
    fleet: Fleet,
    coordinator: FakeCoordinator,
    change: Callable[[training_pb2.Assignment, FakeCoordinator], None],
    reason: int,
    words: str,
) -> None:
    """The daemon reports the reason, stays up and does the next assignment."""
    assignment = coordinator.assignment()
    change(assignment, coordinator)
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=assignment)
        await coordinator.until(lambda: coordinator.calls["ReportStatus"])
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    (failure,) = coordinator.calls["ReportStatus"][0].failures
    assert failure.reason == reason
    assert re.search(words, failure.message), failure.message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no such sensor"), SystemExit(0), SystemExit("no such sensor"), KeyboardInterrupt(),
        asyncio.CancelledError("no such sensor"), GeneratorExit(),
    ],
    ids=repr,
)  # fmt: skip
async def test_a_task_that_raises_does_not_end_the_daemon(
    fleet: Fleet, coordinator: FakeCoordinator, error: BaseException
) -> None:
    """Whatever its code raises goes to the coordinator and into the log, with type, text, file and line."""
    fleet.task.error = error
    with capture_logs() as lines:
        await _fail_and_go_on(fleet, coordinator)
    (failure,) = coordinator.calls["ReportStatus"][0].failures
    assert failure.reason == pb.FAILURE_REASON_TASK_ERROR
    assert re.fullmatch(r"tests/fl_client/fake_coordinator\.py, line \d+, in \w+", failure.place)
    text = f": {error}" if str(error) else ""
    assert failure.message == f"{type(error).__name__}{text} ({failure.place})"
    assert failure.error_type == type(error).__name__
    (line,) = [line for line in lines if line["event"] == "work_failed"]
    assert "raise self.error" in line["exception"]


async def _fail_and_go_on(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment())
        await coordinator.until(lambda: coordinator.calls["ReportStatus"])
        fleet.task.error = None
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)


async def test_a_device_whose_step_never_ends_takes_no_work(
    fleet: Fleet, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the deadline it reports that it may not train, and where its code is; once the step ends it may again."""
    monkeypatch.setattr(hung_training, "CHECK_S", 0.01)
    monkeypatch.setattr(hung_training, "HANGS_S", 0.05)
    fleet.task.block, calls = threading.Event(), coordinator.calls["ReportStatus"]
    first = coordinator.assignment()
    first.deadline.FromMilliseconds(10)
    try:
        async with fleet.daemon():
            await coordinator.until(lambda: coordinator.calls["Attend"])
            coordinator.push(assignment=first)
            await coordinator.until(lambda: any(_may_not_train(each) for each in calls))
            (detail, *_) = [each.availability.detail for each in calls if _may_not_train(each)]
            coordinator.push(assignment=coordinator.assignment(1))
            await coordinator.until(lambda: 1 in [failure.key.round for each in calls for failure in each.failures])
            fleet.task.block.set()
            await coordinator.until(lambda: calls[-1].availability.may_train)
            coordinator.assign(coordinator.assignment(2))
            await coordinator.until(lambda: 2 in coordinator.updates)
    finally:
        fleet.task.block.set()
    place = r"tests/fl_client/fake_coordinator\.py, line \d+, in loss"
    text = rf"training: a step has not ended \d+ s after its work was cancelled at {place}: restart the daemon"
    assert re.fullmatch(text, detail)


def _may_not_train(report: pb.ReportStatusRequest) -> bool:
    return report.HasField("availability") and not report.availability.may_train


async def test_work_that_arrives_while_the_daemon_stops_is_not_started(
    fleet: Fleet, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for a connection without end, and the daemon would wait for it."""
    monkeypatch.setattr(daemon, "GOODBYE_SECONDS", 0.5)
    first, second, note = coordinator.assignment(0), coordinator.assignment(1), coordinator._note

    async def push_and_say_nothing(method: str, request: Any) -> None:
        await note(method, request)
        if method == "ReportStatus":
            coordinator.push(assignment=second)
            await asyncio.Event().wait()

    monkeypatch.setattr(coordinator, "_note", push_and_say_nothing)
    async with fleet.daemon():
        coordinator.assign(first)
        await coordinator.until(lambda: coordinator.updates)
    assert coordinator.calls["ReportStatus"]
    assert list(coordinator.updates) == [0]
