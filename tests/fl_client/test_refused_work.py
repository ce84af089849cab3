"""Work that the coordinator refuses, or in which it always fails, is given up and reported at once."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from fl_client.connection import link
from fl_client.connection.link import MAX_FAILED_CALLS
from fl_client.storage.pending_updates import PendingUpdates
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import errors_pb2
from tests.fl_client.fake_coordinator import FakeCoordinator, key
from tests.fl_client.fleet import Fleet

REFUSAL = errors_pb2.InvalidField(field="header")
FAULT = (errors_pb2.InvalidField(), grpc.StatusCode.INTERNAL)
"""An INTERNAL call; its detail has no meaning."""


def failures(coordinator: FakeCoordinator) -> list[pb.WorkFailure]:
    """All reported failures."""
    return [failure for status in coordinator.calls["ReportStatus"] for failure in status.failures]


async def reported(coordinator: FakeCoordinator) -> pb.WorkFailure:
    """Wait for the first reported failure."""
    await coordinator.until(lambda: failures(coordinator))
    return failures(coordinator)[0]


@pytest.mark.parametrize(("fault", "method"), [("SubmitUpdate", "SubmitUpdate"), ("Fetch", "FetchModel")])
async def test_a_refused_call_is_reported(fleet: Fleet, coordinator: FakeCoordinator, fault: str, method: str) -> None:
    """After INVALID_ARGUMENT the coordinator learns that no update comes, and why; it need not wait for a deadline."""
    coordinator.faults[fault].append(REFUSAL)
    async with fleet.daemon():
        await coordinator.until_called("Attend")
        coordinator.push(assignment=coordinator.assignment())
        failure = await reported(coordinator)
        assert len(coordinator.calls[method]) >= 1
    assert (failure.key, failure.reason) == (key(0), pb.FAILURE_REASON_REFUSED)
    assert "INVALID_ARGUMENT: injected failure" in failure.message
    assert PendingUpdates(fleet.folder / "pending").exchange_keys() == []


async def test_a_refused_evaluation_is_reported(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """The coordinator waits no longer for this client's metrics."""
    coordinator.faults["ReportEvaluation"].append(REFUSAL)
    train = coordinator.assignment(3)
    evaluation = pb.AttendResponse().evaluation
    evaluation.key.CopyFrom(train.key)
    evaluation.task = train.task
    evaluation.fingerprint.CopyFrom(train.fingerprint)
    evaluation.resources.extend(train.resources)
    async with fleet.daemon():
        await coordinator.until_called("Attend")
        coordinator.push(evaluation=evaluation)
        failure = await reported(coordinator)
    assert (failure.key, failure.reason) == (key(3), pb.FAILURE_REASON_REFUSED)


@pytest.mark.parametrize("fault", ["SubmitUpdate", "Fetch"])
async def test_work_in_which_the_coordinator_always_fails_is_given_up(
    fleet: Fleet, coordinator: FakeCoordinator, fault: str
) -> None:
    """After a fixed number of INTERNAL answers the failure is reported; the daemon does the next assignment."""
    coordinator.faults[fault] += [FAULT] * MAX_FAILED_CALLS
    async with fleet.daemon() as daemon:
        await coordinator.until_called("Attend")
        coordinator.push(assignment=coordinator.assignment(0))
        failure = await reported(coordinator)
        assert coordinator.faults[fault] == []
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: 1 in coordinator.updates)
        assert daemon.count("work_failures_total", reason="refused") == 1
    assert (failure.key, failure.reason) == (key(0), pb.FAILURE_REASON_REFUSED)
    assert f"failed {MAX_FAILED_CALLS} times in a row" in failure.message
    assert "INTERNAL" in failure.message


async def test_an_update_that_may_have_arrived_is_kept(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """An INTERNAL answer does not mean that the update was not written: a client state may follow from it."""
    coordinator.faults["SubmitUpdate"] += [FAULT] * MAX_FAILED_CALLS
    async with fleet.daemon():
        await coordinator.until_called("Attend")
        coordinator.push(assignment=coordinator.assignment(0))
        await reported(coordinator)
    assert PendingUpdates(fleet.folder / "pending").exchange_keys() == [key(0)]


async def test_a_few_faults_end_no_work(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """One fault fewer than the limit, and the update arrives."""
    coordinator.faults["SubmitUpdate"] += [FAULT] * (MAX_FAILED_CALLS - 1)
    async with fleet.daemon():
        await coordinator.until_called("Attend")
        coordinator.assign(coordinator.assignment(0))
        await coordinator.until(lambda: coordinator.updates)
    assert failures(coordinator) == []


async def test_a_lost_connection_ends_no_work(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """UNAVAILABLE is retried without a limit: a coordinator may be down for long."""
    later = (errors_pb2.InvalidField(), grpc.StatusCode.UNAVAILABLE)
    coordinator.faults["SubmitUpdate"] += [later] * (MAX_FAILED_CALLS + 1)
    async with fleet.daemon():
        await coordinator.until_called("Attend")
        coordinator.assign(coordinator.assignment(0))
        await coordinator.until(lambda: coordinator.updates)
    assert failures(coordinator) == []


async def test_an_availability_that_cannot_be_reported_is_reported_later(
    fleet: Fleet, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator fails in more calls than one series has; the daemon says so, and tries again."""
    monkeypatch.setattr(link, "MAX_FAILED_CALLS", 2)
    coordinator.faults["ReportStatus"] += [FAULT] * 3
    gates: Any = {"windows": ["00:00-12:00"], "timezone": "UTC"}
    clock = {"now": 6 * 3600.0}
    with capture_logs() as logs:
        async with fleet.daemon(clock=lambda: clock["now"], gates={**gates, "check_s": 0.01}):
            await coordinator.until_called("Attend")
            clock["now"] = 13 * 3600.0
            await coordinator.until(lambda: coordinator.calls["ReportStatus"])
    assert not coordinator.calls["ReportStatus"][0].availability.may_train
    assert [line["event"] for line in logs if line["event"].startswith("availability")] == ["availability_not_told"]
