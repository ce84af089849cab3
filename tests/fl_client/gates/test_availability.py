"""A daemon with gates that close and open: the reports to the coordinator, and the work in progress."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fl_client.errors import ConfigError
from fl_client.gates.availability import availability_of
from fl_client.gates.gate_set import ClosedGate
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1.coordinator_pb2 import UnavailableReason
from tests.fl_client.fake_coordinator import FakeCoordinator, key
from tests.fl_client.fleet import Fleet
from tests.fl_client.gates.hardware import Hardware

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()


@pytest.fixture
def hardware(tmp_path: Path) -> Hardware:
    """A device that is on mains and cool."""
    hardware = Hardware(tmp_path / "sys")
    hardware.plug(True)
    hardware.zone(0, "cpu", 40_000)
    return hardware


@pytest.fixture
def gates(hardware: Hardware) -> dict[str, Any]:
    """Settings of gates with very frequent checks."""
    return {"on_mains": True, "sysfs": str(hardware.root), "check_s": 0.01, "open_after_s": 0.0}


def reported(coordinator: FakeCoordinator) -> list[pb.Availability]:
    """The reports of availability outside registrations."""
    return [report.availability for report in coordinator.calls["ReportStatus"] if report.HasField("availability")]


def failures(coordinator: FakeCoordinator) -> list[pb.WorkFailure]:
    """The reported failures."""
    return [failure for report in coordinator.calls["ReportStatus"] for failure in report.failures]


async def test_a_registration_reports_open_gates(coordinator: FakeCoordinator, fleet: Fleet) -> None:
    """Without any gates too."""
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        assert coordinator.calls["Register"][0].availability == pb.Availability(may_train=True)
        assert daemon.count("may_train") == 1


async def test_a_registration_has_the_closed_gate(
    coordinator: FakeCoordinator, fleet: Fleet, gates: dict[str, Any], hardware: Hardware
) -> None:
    """The registration has the reason, and so have the metrics."""
    hardware.plug(False)
    async with fleet.daemon(gates=gates) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        assert coordinator.calls["Register"][0].availability == pb.Availability(
            may_train=False, reason=pb.UNAVAILABLE_REASON_POWER, detail="power: on battery"
        )
        assert (daemon.count("may_train"), daemon.count("gate_closed", gate="power")) == (0, 1)


async def test_changes_are_reported(
    coordinator: FakeCoordinator, fleet: Fleet, gates: dict[str, Any], hardware: Hardware
) -> None:
    """Unplugging and plugging in give two reports and change the metrics."""
    async with fleet.daemon(gates=gates) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        hardware.plug(False)
        await coordinator.until(lambda: len(reported(coordinator)) == 1)
        assert (daemon.count("may_train"), daemon.count("gate_closed", gate="power")) == (0, 1)
        hardware.plug(True)
        await coordinator.until(lambda: len(reported(coordinator)) == 2)
        assert (daemon.count("may_train"), daemon.count("gate_closed", gate="power")) == (1, 0)
    assert [availability.may_train for availability in reported(coordinator)] == [False, True, False]
    assert reported(coordinator)[2].reason == pb.UNAVAILABLE_REASON_STOPPING


async def test_the_newest_availability_is_told_again_after_an_older_one(
    silent_coordinator: FakeCoordinator,
    make_fleet: Callable[[FakeCoordinator], Fleet],
    gates: dict[str, Any],
    hardware: Hardware,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The report of a failure from behind a closed gate takes long, and the gate opens meanwhile."""
    coordinator = silent_coordinator
    real, goes_on = coordinator.ReportStatus, asyncio.Event()

    async def slow(request: pb.ReportStatusRequest, context: Any) -> pb.ReportStatusResponse:
        if request.failures:
            await goes_on.wait()
        return await real(request, context)

    monkeypatch.setattr(coordinator, "ReportStatus", slow)
    async with coordinator.serving(), make_fleet(coordinator).daemon(gates=gates):
        await coordinator.until(lambda: coordinator.calls["Attend"])
        hardware.plug(False)
        await coordinator.until(lambda: len(reported(coordinator)) == 1)
        coordinator.push(assignment=coordinator.assignment(0))
        await asyncio.sleep(0.2)  # its failure is on its way
        hardware.plug(True)
        await coordinator.until(lambda: len(reported(coordinator)) == 2)
        goes_on.set()
        await coordinator.until(lambda: len(reported(coordinator)) == 4)
    assert [availability.may_train for availability in reported(coordinator)[:4]] == [False, True, False, True]


async def test_a_change_without_a_session_is_reported_later(
    silent_coordinator: FakeCoordinator,
    make_fleet: Callable[[FakeCoordinator], Fleet],
    gates: dict[str, Any],
    hardware: Hardware,
) -> None:
    """The device is unplugged while the coordinator is down. The next session reports it."""
    fleet = make_fleet(silent_coordinator)
    async with silent_coordinator.serving():
        pass
    async with fleet.daemon(gates=gates) as daemon:
        hardware.plug(False)
        await daemon.until(lambda: daemon.count("may_train") == 0)
        async with silent_coordinator.serving() as coordinator:
            await coordinator.until(lambda: coordinator.calls["Register"])
            assert not coordinator.calls["Register"][0].availability.may_train


async def test_a_window_opens_when_its_time_comes(coordinator: FakeCoordinator, fleet: Fleet) -> None:
    """Just before 12:30 UTC it reports the end. At 12:30 it may train, although the next check is an hour later."""
    opens = NOON + 1800
    now = [opens - 0.05]
    gates = {"windows": ["12:30-13:00"], "timezone": "UTC", "check_s": 3600}
    async with fleet.daemon(clock=lambda: now[0], gates=gates):
        await coordinator.until(lambda: coordinator.calls["Attend"])
        closed = coordinator.calls["Register"][0].availability
        assert (closed.reason, closed.detail) == (
            pb.UNAVAILABLE_REASON_TIME_WINDOW,
            "window: outside 12:30-13:00 (UTC)",
        )
        assert closed.until.seconds == opens
        now[0] = opens
        await coordinator.until(lambda: reported(coordinator))
        assert reported(coordinator)[0].may_train


async def test_work_that_arrives_behind_a_closed_gate_is_refused(
    coordinator: FakeCoordinator, fleet: Fleet, gates: dict[str, Any], hardware: Hardware
) -> None:
    """Pushed before the coordinator knew it: the failure has the reason and the availability."""
    hardware.plug(False)
    async with fleet.daemon(gates=gates) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(coordinator.assignment())
        await coordinator.until(lambda: failures(coordinator))
        assert daemon.count("training_steps_total") == 0
    (failure,) = failures(coordinator)
    assert (failure.key, failure.reason) == (key(0), pb.FAILURE_REASON_STOPPED)
    assert failure.message == "the owner's gates are closed: power: on battery"
    assert not reported(coordinator)[0].may_train


async def test_training_is_given_up_on_battery(
    coordinator: FakeCoordinator, fleet: Fleet, gates: dict[str, Any], hardware: Hardware
) -> None:
    """In mid-training: one message has the failure and the reason together, and nothing is sent."""
    fleet.task.block = threading.Event()
    async with fleet.daemon(gates=gates) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(coordinator.assignment(local_steps=1000))
        await daemon.until(fleet.task.started.is_set)
        hardware.plug(False)
        await coordinator.until(lambda: failures(coordinator))
        fleet.task.block.set()
    report = next(status for status in coordinator.calls["ReportStatus"] if status.failures)
    assert report.failures[0].reason == pb.FAILURE_REASON_STOPPED
    assert (report.availability.reason, report.availability.may_train) == (pb.UNAVAILABLE_REASON_POWER, False)
    assert coordinator.updates == {}
    assert fleet.task.steps < 1000


async def test_training_is_finished_if_the_owner_allows_it(
    coordinator: FakeCoordinator, fleet: Fleet, gates: dict[str, Any], hardware: Hardware
) -> None:
    """With finish = ["power"] the update is sent on battery. The next round does not start."""
    fleet.task.block = threading.Event()
    async with fleet.daemon(gates={**gates, "finish": ["power"]}) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(coordinator.assignment(0))
        await daemon.until(fleet.task.started.is_set)
        hardware.plug(False)
        await coordinator.until(lambda: reported(coordinator))
        fleet.task.block.set()
        await coordinator.until(lambda: 0 in coordinator.updates)
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: failures(coordinator))
    assert [failure.key for failure in failures(coordinator)] == [key(1)]


async def test_the_later_exchanges_of_a_round_are_finished_too(
    coordinator: FakeCoordinator, fleet: Fleet, gates: dict[str, Any], hardware: Hardware
) -> None:
    """A round of two exchanges that was begun in time goes on behind a gate that lets rounds be finished."""
    async with fleet.daemon(gates={**gates, "finish": ["power"]}) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(coordinator.assignment(0))
        await coordinator.until(lambda: 0 in coordinator.updates)
        hardware.plug(False)
        await daemon.until(lambda: daemon.count("may_train") == 0)
        second = coordinator.assignment(0)
        second.key.exchange = 1
        coordinator.assign(second)
        await coordinator.until(lambda: len(coordinator.calls["FetchModel"]) > 2 or failures(coordinator))
    assert not any(failure.reason == pb.FAILURE_REASON_STOPPED for failure in failures(coordinator))


async def test_another_gate_ends_a_round_that_may_finish(
    coordinator: FakeCoordinator, fleet: Fleet, gates: dict[str, Any], hardware: Hardware
) -> None:
    """On battery the round may finish; at high temperature it may not."""
    fleet.task.block = threading.Event()
    settings = {**gates, "finish": ["power"], "temperature_below": 75}
    async with fleet.daemon(gates=settings) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(coordinator.assignment(local_steps=1000))
        await daemon.until(fleet.task.started.is_set)
        hardware.plug(False)
        await coordinator.until(lambda: reported(coordinator))
        hardware.zone(0, "cpu", 90_000)
        await coordinator.until(lambda: failures(coordinator))
        fleet.task.block.set()
    words = "temperature: cpu at 90 degrees Celsius, the limit is 75; power: on battery"
    assert failures(coordinator)[0].message == f"the owner's gates are closed: {words}"


async def test_a_stored_update_is_sent_behind_closed_gates(
    coordinator: FakeCoordinator, fleet: Fleet, gates: dict[str, Any], hardware: Hardware
) -> None:
    """It is already trained, so sending it costs little and completes the round."""
    coordinator.faults["cut_upload"] = [0] * 1000
    async with fleet.daemon(gates=gates) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(coordinator.assignment())
        await daemon.until(lambda: daemon.count("rounds_trained_total") == 1)
        await coordinator.until(lambda: coordinator.calls["SubmitUpdate"])
    coordinator.faults["cut_upload"].clear()
    hardware.plug(False)
    async with fleet.daemon(gates=gates) as daemon:
        await coordinator.until(lambda: 0 in coordinator.updates)
        assert daemon.count("rounds_trained_total") == 0


async def test_a_gate_without_its_sensor_ends_the_start(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    """The message names the setting, the missing sensor and the remedy."""
    gates = {"on_mains": True, "sysfs": str(tmp_path / "nothing")}
    with pytest.raises(ConfigError, match="gates.on_mains: expected a power supply in .* remove it"):
        async with Fleet(coordinator, tmp_path / "state").daemon(gates=gates):
            pass


def closed(gate: str, reason: UnavailableReason, until: float | None = None) -> ClosedGate:
    """A gate that is closed."""
    return ClosedGate(gate, reason, "x", until)


WINDOW = closed("window", pb.UNAVAILABLE_REASON_TIME_WINDOW, 100.0)
HOT = closed("temperature", pb.UNAVAILABLE_REASON_TEMPERATURE)


def test_the_first_gates_reason_and_all_details_are_reported() -> None:
    """The end of the heat is unknown, so no time is reported although the window has one."""
    availability = availability_of([HOT, WINDOW])
    assert (availability.reason, availability.detail) == (
        pb.UNAVAILABLE_REASON_TEMPERATURE,
        "temperature: x; window: x",
    )
    assert not availability.HasField("until")
    assert availability_of([WINDOW]).until.seconds == 100


def test_a_long_list_of_windows_fits_into_what_a_coordinator_takes() -> None:
    """The text is cut to 256 characters."""
    long = ClosedGate("window", pb.UNAVAILABLE_REASON_TIME_WINDOW, "x" * 1000, None)
    assert len(availability_of([long]).detail) == 256
