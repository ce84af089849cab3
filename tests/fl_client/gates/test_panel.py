"""All gates together: which are closed, when one is believed to be open again, and sensors that fail."""

from __future__ import annotations

from structlog.testing import capture_logs

from fl_client.gates.panel import FAILURES, Panel
from fl_client.gates.power import PowerGate
from fl_client.gates.schedule import Schedule
from fl_client.gates.temperature import Limits, TemperatureGate
from fl_client.gates.window import WindowGate


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, now=0.0):
        self.now = now

    def __call__(self):
        return self.now


def closed(panel):
    """Names of the closed gates."""
    return [each.gate for each in panel.look()]


def test_a_gate_closes_at_once_and_opens_when_that_has_lasted(hardware):
    """Plugged in for 59 seconds is not enough, and a moment without starts the minute anew."""
    hardware.plug(True)
    clock, found = Clock(), []
    panel = Panel([PowerGate(hardware.root)], 60.0, clock)
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
        found.append(not panel.look())
    assert found == [True, False, False, False, False, False, False, True]


def test_what_is_well_at_the_start_is_open_at_once(hardware):
    """Nobody waits a minute for a device that has been on mains all along."""
    hardware.plug(True)
    assert closed(Panel([PowerGate(hardware.root)], 60.0, Clock())) == []


def test_a_window_opens_on_time():
    """It does not waver: its opening needs no time to be believed. 1970-01-01 was a Thursday."""
    clock = Clock(21 * 3600 + 59 * 60)
    panel = Panel([WindowGate(Schedule(["thu 22:00-24:00"], None), "", clock)], 60.0, clock)
    (shut,) = panel.look()
    assert (shut.detail, shut.until, panel.changes_at) == ("outside thu 22:00-24:00", 22 * 3600, 22 * 3600)
    clock.now = 22 * 3600
    assert (closed(panel), panel.changes_at) == ([], 24 * 3600)


def test_a_clock_that_is_set_back_is_believed():
    """What was found for later says nothing of earlier."""
    clock = Clock(23 * 3600)
    panel = Panel([WindowGate(Schedule(["22:00-24:00"], None), "", clock)], 0.0, clock)
    assert closed(panel) == []
    clock.now = 12 * 3600
    assert closed(panel) == ["window"]


def test_what_a_closed_gate_says_stays(hardware):
    """The coordinator need not hear of each degree."""
    hardware.zone(0, "cpu", 80_000)
    panel = Panel([TemperatureGate(hardware.root, [], Limits(75.0, 5.0))], 60.0, Clock())
    first = panel.look()
    hardware.zone(0, "cpu", 81_000)
    assert panel.look() == first


def test_a_sensor_that_fails_is_waited_for_and_told_once(hardware):
    """Two failed readings change nothing, from the third on the gate is closed, and one warning is all."""
    file = hardware.zone(0, "cpu", 50_000)
    panel = Panel([TemperatureGate(hardware.root, [], Limits(75.0, 5.0))], 0.0, Clock())
    file.unlink()
    with capture_logs() as logs:
        found = [closed(panel) for _ in range(FAILURES + 2)]
    assert found == [[], [], *[["temperature"]] * 3]
    assert [(each["event"], each["log_level"]) for each in logs] == [("gate_sensor_failed", "warning")]
    assert panel.look()[0].detail.startswith("cannot be read: expected to read")
    hardware.zone(0, "cpu", 50_000)
    assert closed(panel) == []


def test_failures_that_are_not_in_a_row_close_nothing(hardware):
    """Each reading that comes begins the count anew."""
    panel = Panel([PowerGate(_plugged(hardware))], 0.0, Clock())
    line = hardware.root / "class/power_supply/AC/online"
    for _ in range(FAILURES):
        line.write_text("?")
        assert closed(panel) == []
        assert closed(panel) == []
        line.write_text("1")
        assert closed(panel) == []


def test_a_failure_is_no_sign_that_it_is_well_again(hardware):
    """The minute after which a gate opens is one of readings."""
    clock = Clock()
    panel = Panel([PowerGate(_plugged(hardware))], 60.0, clock)
    line = hardware.root / "class/power_supply/AC/online"
    found = []
    for now, online in ((0, "0"), (1, "1"), (30, "?"), (61, "1"), (120, "1"), (121, "1")):
        clock.now = now
        line.write_text(online)
        found.append(closed(panel))
    assert found == [["power"]] * 5 + [[]]


def test_each_gate_stands_for_itself(hardware):
    """Both closed, one of them, none; in the order in which they were given."""
    hardware.plug(False)
    hardware.zone(0, "cpu", 80_000)
    panel = Panel([TemperatureGate(hardware.root, [], Limits(75.0, 5.0)), PowerGate(hardware.root)], 0.0, Clock())
    assert closed(panel) == ["temperature", "power"]
    hardware.zone(0, "cpu", 20_000)
    assert closed(panel) == ["power"]
    hardware.plug(True)
    assert closed(panel) == []


def _plugged(hardware):
    hardware.supply("AC", type="Mains", online="1")
    return hardware.root
