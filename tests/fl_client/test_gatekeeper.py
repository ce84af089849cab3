"""A daemon whose gates close and open: what the coordinator hears, and what becomes of the work under way."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import pytest

from fl_client.errors import ConfigError
from fl_client.gatekeeper import availability_of
from fl_client.gates.panel import Closed
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_client.conftest import Fleet, key
from tests.fl_client.gates.hardware import Hardware

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()


@pytest.fixture
def hardware(tmp_path):
    """A device that is on mains and cool."""
    hardware = Hardware(tmp_path / "sys")
    hardware.plug(True)
    hardware.zone(0, "cpu", 40_000)
    return hardware


@pytest.fixture
def gates(hardware):
    """Settings of gates that are looked at all the time."""
    return {"on_mains": True, "sysfs": str(hardware.root), "check_s": 0.01, "open_after_s": 0.0}


def said(coordinator):
    """What the coordinator was told of availability outside registrations."""
    return [each.availability for each in coordinator.calls["ReportStatus"] if each.HasField("availability")]


def failures(coordinator):
    """What work it was told of that will not be delivered."""
    return [failure for each in coordinator.calls["ReportStatus"] for failure in each.failures]


async def test_a_registration_says_that_the_gates_are_open(coordinator, fleet):
    """Without any gates too."""
    async with fleet.daemon() as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        assert coordinator.calls["Register"][0].availability == pb.Availability(may_train=True)
        assert daemon.count("may_train") == 1


async def test_a_registration_says_that_a_gate_is_closed(coordinator, fleet, gates, hardware):
    """And why; the metrics say so too."""
    hardware.plug(False)
    async with fleet.daemon(gates=gates) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        assert coordinator.calls["Register"][0].availability == pb.Availability(
            may_train=False, reason=pb.UNAVAILABLE_REASON_POWER, detail="power: on battery"
        )
        assert (daemon.count("may_train"), daemon.count("gate_closed", gate="power")) == (0, 1)


async def test_changes_are_told_when_they_come(coordinator, fleet, gates, hardware):
    """Pulled and plugged in again: two messages, and the metrics with them."""
    async with fleet.daemon(gates=gates) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        hardware.plug(False)
        await coordinator.until(lambda: len(said(coordinator)) == 1)
        assert (daemon.count("may_train"), daemon.count("gate_closed", gate="power")) == (0, 1)
        hardware.plug(True)
        await coordinator.until(lambda: len(said(coordinator)) == 2)
        assert (daemon.count("may_train"), daemon.count("gate_closed", gate="power")) == (1, 0)
    assert [each.may_train for each in said(coordinator)] == [False, True, False]
    assert said(coordinator)[2].reason == pb.UNAVAILABLE_REASON_STOPPING


async def test_a_change_while_nobody_listens_is_told_later(silent_coordinator, make_fleet, gates, hardware):
    """The plug is pulled while the coordinator is away: the next session hears of it."""
    fleet = make_fleet(silent_coordinator)
    async with silent_coordinator.serving():
        pass
    async with fleet.daemon(gates=gates) as daemon:
        hardware.plug(False)
        await daemon.until(lambda: daemon.count("may_train") == 0)
        async with silent_coordinator.serving() as coordinator:
            await coordinator.until(lambda: coordinator.calls["Register"])
            assert not coordinator.calls["Register"][0].availability.may_train


async def test_a_window_opens_when_its_time_comes(coordinator, fleet):
    """Just before 12:30 UTC it says until when, and at 12:30 it may train, although no look is due for an hour."""
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
        await coordinator.until(lambda: said(coordinator))
        assert said(coordinator)[0].may_train


async def test_work_that_comes_while_a_gate_is_closed_is_given_back(coordinator, fleet, gates, hardware):
    """Pushed before the coordinator had heard of it: the answer says why, and that this device may not train."""
    hardware.plug(False)
    async with fleet.daemon(gates=gates) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(coordinator.assignment())
        await coordinator.until(lambda: failures(coordinator))
        assert daemon.count("training_steps_total") == 0
    (failure,) = failures(coordinator)
    assert (failure.key, failure.reason) == (key(0), pb.FAILURE_REASON_STOPPED)
    assert failure.message == "the owner's gates are closed: power: on battery"
    assert not said(coordinator)[0].may_train


async def test_training_is_given_up_when_the_plug_is_pulled(coordinator, fleet, gates, hardware):
    """In mid-training: one message has the failure and the reason together, and nothing is sent."""
    fleet.task.block = threading.Event()
    async with fleet.daemon(gates=gates) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(coordinator.assignment(local_steps=1000))
        await daemon.until(fleet.task.started.is_set)
        hardware.plug(False)
        await coordinator.until(lambda: failures(coordinator))
        fleet.task.block.set()
    report = next(each for each in coordinator.calls["ReportStatus"] if each.failures)
    assert report.failures[0].reason == pb.FAILURE_REASON_STOPPED
    assert (report.availability.reason, report.availability.may_train) == (pb.UNAVAILABLE_REASON_POWER, False)
    assert coordinator.updates == {}
    assert fleet.task.steps < 1000


async def test_training_is_finished_where_the_owner_lets_it(coordinator, fleet, gates, hardware):
    """With finish = ["power"] the update comes although the plug was pulled; the next round does not begin."""
    fleet.task.block = threading.Event()
    async with fleet.daemon(gates={**gates, "finish": ["power"]}) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(coordinator.assignment(0))
        await daemon.until(fleet.task.started.is_set)
        hardware.plug(False)
        await coordinator.until(lambda: said(coordinator))
        fleet.task.block.set()
        await coordinator.until(lambda: 0 in coordinator.updates)
        coordinator.assign(coordinator.assignment(1))
        await coordinator.until(lambda: failures(coordinator))
    assert [failure.key for failure in failures(coordinator)] == [key(1)]


async def test_the_later_exchanges_of_a_round_are_finished_too(coordinator, fleet, gates, hardware):
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


async def test_a_worse_gate_ends_what_another_let_finish(coordinator, fleet, gates, hardware):
    """On battery the round is finished; too hot as well, it is not."""
    fleet.task.block = threading.Event()
    settings = {**gates, "finish": ["power"], "temperature_below": 75}
    async with fleet.daemon(gates=settings) as daemon:
        await coordinator.until(lambda: coordinator.calls["Attend"])
        coordinator.assign(coordinator.assignment(local_steps=1000))
        await daemon.until(fleet.task.started.is_set)
        hardware.plug(False)
        await coordinator.until(lambda: said(coordinator))
        hardware.zone(0, "cpu", 90_000)
        await coordinator.until(lambda: failures(coordinator))
        fleet.task.block.set()
    words = "temperature: cpu at 90 degrees Celsius, the limit is 75; power: on battery"
    assert failures(coordinator)[0].message == f"the owner's gates are closed: {words}"


async def test_an_update_that_was_kept_is_sent_behind_closed_gates(coordinator, fleet, gates, hardware):
    """It is trained already: sending it costs next to nothing, and saves the round."""
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


async def test_a_gate_without_its_sensor_ends_the_start(coordinator, tmp_path):
    """The message names the setting, what was looked for and what to do."""
    gates = {"on_mains": True, "sysfs": str(tmp_path / "nothing")}
    with pytest.raises(ConfigError, match="gates.on_mains: expected a power supply in .* remove it"):
        async with Fleet(coordinator, tmp_path / "state").daemon(gates=gates):
            pass


def closed(gate, reason, until=None):
    """A gate that is closed."""
    return Closed(gate, reason, "x", until)


WINDOW = closed("window", pb.UNAVAILABLE_REASON_TIME_WINDOW, 100.0)
HOT = closed("temperature", pb.UNAVAILABLE_REASON_TEMPERATURE)


def test_the_first_gates_reason_is_told_and_all_words():
    """Nobody knows when it will be cooler, so no time is told although the window has one."""
    told = availability_of([HOT, WINDOW])
    assert (told.reason, told.detail) == (pb.UNAVAILABLE_REASON_TEMPERATURE, "temperature: x; window: x")
    assert not told.HasField("until")
    assert availability_of([WINDOW]).until.seconds == 100


def test_a_long_list_of_windows_fits_into_what_a_coordinator_takes():
    """256 characters, the beginning."""
    long = Closed("window", pb.UNAVAILABLE_REASON_TIME_WINDOW, "x" * 1000, None)
    assert len(availability_of([long]).detail) == 256
