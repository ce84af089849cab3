"""A whole daemon against a real grpc server: what it does with assignments, orders and refusals."""

from __future__ import annotations

import asyncio
import random
import re
import threading

import grpc
import pytest
import torch
from structlog.testing import capture_logs

from fl_client import daemon
from fl_client.attendance import Attendance, Door
from fl_client.errors import Fenced
from fl_client.link import Link, Waits
from protos import codec
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2, tensor_pb2, training_pb2


def values(update):
    """The tensors of an update that arrived."""
    header, data = update
    return codec.unpack(data, codec.Layout.from_manifest(header.payloads[0].manifest, 1 << 20))


async def test_an_assignment_becomes_an_update(fleet, coordinator):
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


async def test_registration_says_what_the_device_is(fleet, coordinator):
    """Identity, task, fingerprint, examples, device and protocol stand in the first message."""
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
    (request,) = coordinator.calls["Register"]
    (offer,) = request.tasks
    assert (request.client_id, offer.name, offer.train_examples, offer.eval_examples) == ("edge-1", "tiny", 2, 2)
    assert request.device.kind == "cpu"
    assert request.protocol.min <= request.protocol.max


async def test_a_held_bundle_is_not_fetched_again(fleet, coordinator):
    """Two rounds from the same model: model and frozen part come down once each."""
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        for number in range(2):
            coordinator.assign(coordinator.assignment(number))
            await coordinator.until(lambda number=number: number in coordinator.updates)
    assert len(coordinator.calls["FetchModel"]) == 2


async def test_fedcm_follows_the_direction_that_came_down(fleet, coordinator):
    """alpha = 0.5, Delta = 4: d = 0.5 * (-10) + 0.5 * 4 = -3, so delta = 0.03."""
    assignment = coordinator.assignment(algorithm="fedcm")
    assignment.training.algorithm.parameters.update({"alpha": 0.5})
    direction = coordinator.publish(tensor_pb2.RESOURCE_KIND_DIRECTION, {"w": torch.tensor([4.0])}, {"w"})
    assignment.resources.append(direction)
    async with fleet.daemon():
        coordinator.outstanding.append(pb.AttendResponse(assignment=assignment))
        await coordinator.until(lambda: coordinator.updates)
    torch.testing.assert_close(values(coordinator.updates[0])["w"], torch.tensor([0.03]))


async def test_cancel_ends_training_in_the_middle(fleet, coordinator):
    """A work of endless steps is dropped by Cancel, and the next assignment is done."""
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0, local_steps=1 << 23))
        await asyncio.to_thread(fleet.task.started.wait)
        coordinator.push(cancel=pb.Cancel(key=training_pb2.ExchangeKey(run_id="run", round=0)))
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: coordinator.updates)
    assert list(coordinator.updates) == [1]
    assert daemon.count("rounds_trained_total") == 1


async def test_a_later_round_ends_the_training_of_an_earlier_one(fleet, coordinator):
    """Cancel was not heard, for the link was down at that moment: the next assignment says that the round is over."""
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0, local_steps=1 << 23))
        await asyncio.to_thread(fleet.task.started.wait)
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: coordinator.updates)
    assert list(coordinator.updates) == [1]
    assert daemon.count("rounds_trained_total") == 1


async def test_training_that_nobody_waits_for_ends_with_the_next_registration(fleet, coordinator):
    """It asks for the outcome of what it is still making; told that it will not count, it is free for another run."""
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


async def test_stopping_ends_training_and_says_so(fleet, coordinator):
    """Told to stop in mid-training, the daemon reports STOPPING and leaves with an idle thread."""
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0, local_steps=1 << 23))
        await asyncio.to_thread(fleet.task.started.wait)
        daemon.stop.set()
        assert await daemon.task is True
    (status,) = coordinator.calls["ReportStatus"]
    assert status.availability.reason == pb.UNAVAILABLE_REASON_STOPPING
    assert not coordinator.updates


async def test_a_step_that_does_not_end_does_not_keep_the_daemon(fleet, coordinator):
    """Told to stop while a step hangs, the daemon leaves and says that its thread is not idle."""
    fleet.task.block = threading.Event()
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment())
        await asyncio.to_thread(fleet.task.started.wait)
        daemon.stop.set()
        assert await daemon.task is False
        fleet.task.block.set()


async def test_another_daemon_with_the_identity_does_not_end_this_one(fleet, coordinator):
    """Fenced by another instance, or sent away for it, the daemon says what to do, waits, and works again."""
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


def test_the_waits_of_a_fenced_daemon_grow(monkeypatch):
    """From one to the next, up to ten times the longest wait; who had the place for long begins anew."""
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    attendance = Attendance(pb.RegisterRequest, Door("here", lambda: None), Link(Waits()))
    fenced = Fenced("another", by_other_instance=True)
    assert [attendance._wait_as_fenced(1.0, fenced) for _ in range(7)] == [15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 600.0]
    assert attendance._wait_as_fenced(3600.0, fenced) == 15.0


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
async def test_a_refused_stream_is_tried_again(fleet, coordinator, detail):
    """Whatever else Attend fails with, the daemon comes back and works."""
    coordinator.faults["Attend"].append(detail)
    coordinator.outstanding.append(pb.AttendResponse(assignment=coordinator.assignment()))
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.updates)


async def test_no_common_protocol_is_tried_again(fleet, coordinator):
    """A coordinator that is upgraded meanwhile gets the daemon back."""
    coordinator.faults["Register"].append(errors_pb2.ProtocolMismatch())
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
    assert len(coordinator.calls["Register"]) == 2


async def test_evaluation_answers_with_the_task_s_metrics(fleet, coordinator):
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


def _other_layout(assignment, coordinator):
    del assignment.resources[0]
    model = {"w": torch.ones(2), "seen": torch.tensor(5)}
    assignment.resources.append(coordinator.publish(tensor_pb2.RESOURCE_KIND_MODEL, model, {"w"}))


def _other_fingerprint(assignment, _):
    assignment.fingerprint.version = "2"


def _no_algorithm(assignment, _):
    assignment.training.algorithm.name = "fedmagic"


def _no_parameter(assignment, _):
    assignment.training.algorithm.parameters.update({"warp": 9})


def _other_payload(assignment, _):
    assignment.payloads[:] = [training_pb2.PAYLOAD_KIND_FULL_GRADIENT]


def _huge_rate(assignment, _):
    assignment.training.learning_rate = 1e30
    assignment.training.local_steps = 5


def _other_task(assignment, _):
    assignment.task = "vision"


def _small_limit(assignment, _):
    assignment.max_update_bytes = 4


def _other_encoding(assignment, _):
    assignment.resources[0].encoding = 2


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
        (_other_encoding, pb.FAILURE_REASON_UNSUPPORTED, "encoding PLAIN"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_work_that_cannot_be_done_is_reported(fleet, coordinator, change, reason, words):
    """The coordinator hears why, and the daemon lives on and does the next assignment."""
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


async def test_a_task_that_raises_does_not_end_the_daemon(fleet, coordinator):
    """The task's error goes to the coordinator by name and text."""
    fleet.task.error = RuntimeError("no such sensor")
    async with fleet.daemon():
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment())
        await coordinator.until(lambda: coordinator.calls["ReportStatus"])
        fleet.task.error = None
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
    (failure,) = coordinator.calls["ReportStatus"][0].failures
    assert (failure.reason, failure.message) == (pb.FAILURE_REASON_TASK_ERROR, "RuntimeError: no such sensor")


async def test_work_that_comes_while_the_daemon_says_goodbye_is_not_begun(fleet, coordinator, monkeypatch):
    """Nobody would end it: without a connection it would wait for one, and the daemon for it."""
    monkeypatch.setattr(daemon, "GOODBYE_SECONDS", 0.5)
    first, second, note = coordinator.assignment(0), coordinator.assignment(1), coordinator._note

    async def push_and_say_nothing(method, request):
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
