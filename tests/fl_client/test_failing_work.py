"""A whole daemon and work that cannot be done, or whose task raises or never returns."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from fl_client.assignments import deadline
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import tensor_pb2, training_pb2
from tests.fl_client.fake_coordinator import FakeCoordinator
from tests.fl_client.fleet import Fleet


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
    monkeypatch.setattr(deadline, "CHECK_S", 0.01)
    monkeypatch.setattr(deadline, "HANGS_S", 0.05)
    fleet.task.block, calls = threading.Event(), coordinator.calls["ReportStatus"]
    first = coordinator.assignment()
    first.deadline.FromMilliseconds(10)
    try:
        async with fleet.daemon():
            await coordinator.until(lambda: coordinator.calls["Attend"])
            coordinator.push(assignment=first)
            await coordinator.until(lambda: any(_may_not_train(report) for report in calls))
            (detail, *_) = [report.availability.detail for report in calls if _may_not_train(report)]
            coordinator.push(assignment=coordinator.assignment(1))
            await coordinator.until(lambda: 1 in [failure.key.round for report in calls for failure in report.failures])
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
