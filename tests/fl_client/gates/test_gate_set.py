"""All gates together: which are closed, when one counts as open again, and failing sensors."""

from __future__ import annotations

from pathlib import Path

from structlog.testing import capture_logs

from fl_client.gates.conditions import Limits, PowerGate, TemperatureGate, WindowGate
from fl_client.gates.gate_set import FAILURES, GateSet
from fl_client.settings.schedule import Schedule
from tests.fl_client.gates.hardware import Hardware


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def closed(gates: GateSet) -> list[str]:
    """Names of the closed gates."""
    return [closed.gate for closed in gates.check()]


def test_a_gate_closes_at_once_and_opens_after_a_stable_time(hardware: Hardware) -> None:
    """59 seconds on mains are not enough, and a moment without power restarts the minute."""
    hardware.plug(True)
    clock, found = Clock(), []
    gates = GateSet([PowerGate(hardware.root)], 60.0, clock)
    for now, plugged in (
        (0, True),
        (1, False),
        (2, True),
        (61, True),
        (61.5, False),
        (62, True),
        (121, True),
        (122, True),
    ):
        clock.now = now
        hardware.plug(plugged)
        found.append(not gates.check())
    assert found == [True, False, False, False, False, False, False, True]


def test_a_good_condition_at_the_start_opens_at_once(hardware: Hardware) -> None:
    """A device that is on mains from the start does not wait a minute."""
    hardware.plug(True)
    assert closed(GateSet([PowerGate(hardware.root)], 60.0, Clock())) == []


def test_a_window_opens_on_time() -> None:
    """A window needs no stable time. 1970-01-01 was a Thursday."""
    clock = Clock(21 * 3600 + 59 * 60)
    gates = GateSet([WindowGate(Schedule(["thu 22:00-24:00"], None), "", clock)], 60.0, clock)
    (shut,) = gates.check()
    assert (shut.detail, shut.until, gates.next_change) == ("outside thu 22:00-24:00", 22 * 3600, 22 * 3600)
    clock.now = 22 * 3600
    assert (closed(gates), gates.next_change) == ([], 24 * 3600)


def test_a_clock_that_is_set_back_is_used() -> None:
    """A reading for a later time is not used for an earlier one."""
    clock = Clock(23 * 3600)
    gates = GateSet([WindowGate(Schedule(["22:00-24:00"], None), "", clock)], 0.0, clock)
    assert closed(gates) == []
    clock.now = 12 * 3600
    assert closed(gates) == ["window"]


def test_the_detail_of_a_closed_gate_stays(hardware: Hardware) -> None:
    """The coordinator gets no report of each degree."""
    hardware.zone(0, "cpu", 80_000)
    gates = GateSet([TemperatureGate(hardware.root, [], Limits(75.0, 5.0))], 60.0, Clock())
    first = gates.check()
    hardware.zone(0, "cpu", 81_000)
    assert gates.check() == first


def test_a_failing_sensor_closes_its_gate_with_one_log_line(hardware: Hardware) -> None:
    """Two failed readings change nothing, from the third on the gate is closed, and one warning is all."""
    file = hardware.zone(0, "cpu", 50_000)
    gates = GateSet([TemperatureGate(hardware.root, [], Limits(75.0, 5.0))], 0.0, Clock())
    file.unlink()
    with capture_logs() as logs:
        found = [closed(gates) for _ in range(FAILURES + 2)]
    assert found == [[], [], *[["temperature"]] * 3]
    assert [(line["event"], line["log_level"]) for line in logs] == [("gate_sensor_failed", "warning")]
    assert gates.check()[0].detail.startswith("cannot be read: expected to read")
    hardware.zone(0, "cpu", 50_000)
    assert closed(gates) == []


def test_separate_failures_close_nothing(hardware: Hardware) -> None:
    """Each successful reading restarts the count."""
    gates = GateSet([PowerGate(_plugged(hardware))], 0.0, Clock())
    line = hardware.root / "class/power_supply/AC/online"
    for _ in range(FAILURES):
        line.write_text("?")
        assert closed(gates) == []
        assert closed(gates) == []
        line.write_text("1")
        assert closed(gates) == []


def test_a_failed_reading_does_not_count_toward_opening(hardware: Hardware) -> None:
    """A gate opens only after a minute of successful readings."""
    clock = Clock()
    gates = GateSet([PowerGate(_plugged(hardware))], 60.0, clock)
    line = hardware.root / "class/power_supply/AC/online"
    found = []
    for now, online in ((0, "0"), (1, "1"), (30, "?"), (61, "1"), (120, "1"), (121, "1")):
        clock.now = now
        line.write_text(online)
        found.append(closed(gates))
    assert found == [["power"]] * 5 + [[]]


def test_gates_are_independent(hardware: Hardware) -> None:
    """Both, one or none are closed, reported in their given order."""
    hardware.plug(False)
    hardware.zone(0, "cpu", 80_000)
    gates = GateSet([TemperatureGate(hardware.root, [], Limits(75.0, 5.0)), PowerGate(hardware.root)], 0.0, Clock())
    assert closed(gates) == ["temperature", "power"]
    hardware.zone(0, "cpu", 20_000)
    assert closed(gates) == ["power"]
    hardware.plug(True)
    assert closed(gates) == []


def _plugged(hardware: Hardware) -> Path:
    hardware.supply("AC", type="Mains", online="1")
    return hardware.root
