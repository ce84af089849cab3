"""A whole daemon against a real grpc server: its reaction to assignments, events and refusals."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import grpc
import pytest
import torch
from structlog.testing import capture_logs

from fl_client import daemon
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


async def test_unwanted_training_ends_when_the_daemon_attends_again(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """It asks for the outcome of an update in training, also in its session. If that cannot count, it is free."""
    other = coordinator.assignment(0, key=training_pb2.ExchangeKey(run_id="other"))
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.push(assignment=coordinator.assignment(0, local_steps=1 << 23))
        await asyncio.to_thread(fleet.task.started.wait)
        coordinator.outcomes.append(training_pb2.Outcome(key=coordinator.assignment(0).key, counted=False))
        coordinator.hang_up()
        await coordinator.until(lambda: len(coordinator.calls["Attend"]) == 2)
        coordinator.assign(other)
        await coordinator.until(lambda: coordinator.updates)
    assert list(coordinator.calls["Attend"][1].pending) == [coordinator.assignment(0).key]
    assert len(coordinator.calls["Register"]) == 1
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


async def test_cancelled_training_ends_no_evaluation(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """With a buffer the training of a round may be cancelled while its model is evaluated: the report still comes."""
    assignment, fleet.task.block = coordinator.assignment(0), threading.Event()
    evaluation = training_pb2.EvaluationAssignment(
        key=assignment.key, task="tiny", fingerprint=assignment.fingerprint, resources=assignment.resources
    )
    async with fleet.daemon():
        try:
            await coordinator.until(lambda: coordinator.calls["Attend"])
            coordinator.push(assignment=coordinator.assignment(0, key=training_pb2.ExchangeKey(run_id="other")))
            await asyncio.to_thread(fleet.task.started.wait)  # the evaluation waits for its thread
            coordinator.push(evaluation=evaluation)
            coordinator.push(cancel=pb.Cancel(key=assignment.key))
            coordinator.push(assignment=coordinator.assignment(1, task="foreign"))  # refused, after the cancel
            await coordinator.until(lambda: coordinator.calls["ReportStatus"])
        finally:
            fleet.task.block.set()
        await coordinator.until(lambda: coordinator.calls["ReportEvaluation"])
    assert coordinator.calls["ReportEvaluation"][0].key == assignment.key


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
