"""Power, temperature and GPU, read from folders with the layout of Linux."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fl_client.errors import ConfigError
from fl_client.gates.conditions import Limits, PowerGate, TemperatureGate
from fl_client.gates.gate_set import Gate, SensorError
from fl_client.gates.gpu import READINGS, GpuGate, TegraMeter
from tests.fl_client.gates.hardware import Hardware

ALL_DAY = float("inf")


def is_open(gate: Gate) -> bool:
    """Whether the gate is open at one check."""
    reading = gate.check()
    assert reading is not None
    return reading.open


def gpu_gate(hardware: Hardware, below: float = 0.2, idle_for: Callable[[], float] = lambda: ALL_DAY) -> GpuGate:
    """The gate of a Jetson's GPU, without the pauses between readings."""
    meter = TegraMeter.found(hardware.root)
    assert meter is not None
    gate = GpuGate(meter, below, idle_for)
    gate.pause = lambda seconds: None
    return gate


@pytest.mark.parametrize(
    ("supplies", "expected"),
    [
        ({"AC": {"type": "Mains", "online": "1"}}, True),
        ({"AC": {"type": "Mains", "online": "0"}}, False),
        ({"AC": {"type": "Mains", "online": "0"}, "usb": {"type": "USB", "online": "1"}}, True),
        ({"dock": {"type": "USB_PD", "online": "2"}}, True),
        ({"AC": {"type": "Mains", "online": "1"}, "BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}}, False),
        ({"BAT0": {"type": "Battery", "status": "Full"}, "BAT1": {"type": "Battery", "status": "Discharging"}}, False),
        ({"BAT0": {"type": "Battery", "status": "Not charging"}}, True),
        (
            {
                "BAT0": {"type": "Battery", "status": "Charging"},
                "mouse": {"type": "Battery", "scope": "Device", "status": "Discharging"},
            },
            True,
        ),
    ],
)
def test_power(hardware: Hardware, supplies: dict[str, dict[str, str]], expected: bool) -> None:
    """One external supply is enough. Without any the batteries count. A mouse's battery does not."""
    for name, files in supplies.items():
        hardware.supply(name, **files)
    assert is_open(PowerGate(hardware.root)) is expected


def test_an_unplugged_charger_is_noticed(hardware: Hardware) -> None:
    """The folder is read at each check, and the message names the problem."""
    hardware.plug(True)
    gate = PowerGate(hardware.root)
    hardware.plug(False)
    assert (is_open(gate), gate.check().detail) == (False, "on battery")
    hardware.plug(True)
    assert is_open(gate)


def test_a_device_without_supplies_is_an_error_at_the_start(hardware: Hardware) -> None:
    """Without a supply known to Linux, the power gate cannot work."""
    with pytest.raises(
        ConfigError, match="gates.on_mains: expected a power supply in .*/class/power_supply, found none"
    ):
        PowerGate(hardware.root)


def thermometer(hardware: Hardware, *zones: str, below: float = 75.0, margin: float = 5.0) -> TemperatureGate:
    """A temperature gate."""
    return TemperatureGate(hardware.root, zones, Limits(below, margin))


def test_temperature_closes_at_the_limit_and_opens_below_the_margin(hardware: Hardware) -> None:
    """At 75.0 it closes, at 70.0 it is still closed, at 69.9 it opens, and at 74.9 it stays open."""
    found = []
    hardware.zone(0, "cpu-thermal", 60_000)
    gate = thermometer(hardware)
    for milli in (74_900, 75_000, 70_000, 69_900, 74_900):
        hardware.zone(0, "cpu-thermal", milli)
        found.append(is_open(gate))
    assert found == [True, False, False, True, True]


def test_the_hottest_zone_decides_and_is_named(hardware: Hardware) -> None:
    """One zone is ten degrees hotter than the other."""
    hardware.zone(0, "cpu-thermal", 70_000)
    hardware.zone(1, "gpu-thermal", 80_000)
    assert thermometer(hardware).check().detail == "gpu-thermal at 80 degrees Celsius, the limit is 75"
    assert is_open(thermometer(hardware, "cpu-thermal"))


def test_a_zone_that_measures_nothing_is_passed_over(hardware: Hardware) -> None:
    """Ignored are zones that are powered down, absurd, or a Jetson's constant 100 degrees."""
    hardware.zone(0, "cpu-thermal", 50_000)
    hardware.zone(1, "cv0-thermal", 0).unlink()
    hardware.zone(2, "off", -274_000)
    hardware.zone(5, "broken", 0x7FFFFFFF)
    hardware.zone(3, "PMIC-Die", 100_000)
    hardware.zone(4, "none", "nan")
    assert is_open(thermometer(hardware))


def test_no_zone_that_can_be_read_is_a_failure(hardware: Hardware) -> None:
    """Zones that disappear after the start give no temperature."""
    file = hardware.zone(0, "cpu-thermal", 50_000)
    gate = thermometer(hardware)
    file.unlink()
    with pytest.raises(SensorError, match=r"expected to read .*thermal_zone0/temp, got No such file"):
        gate.check()


@pytest.mark.parametrize(
    ("zones", "words"),
    [
        ((), "gates.temperature_below: expected a thermal zone in .*, found none"),
        (("gpu",), "gates.temperature_zones: expected types in .*, got 'gpu'"),
    ],
)
def test_missing_thermometers_are_an_error_at_the_start(hardware: Hardware, zones: tuple[str, ...], words: str) -> None:
    """The message has the existing zones and the remedy."""
    with pytest.raises(ConfigError, match=words):
        thermometer(hardware, *zones)


@pytest.mark.parametrize(
    "place",
    [
        "class/devfreq/17000000.gpu/device", "class/devfreq/17000000.ga10b/device", "class/devfreq/570000.gm20b/device",
        "devices/platform/gpu.0", "devices/gpu.0",
    ],
)  # fmt: skip
def test_a_jetsons_gpu_is_found_and_read(hardware: Hardware, place: str) -> None:
    """The load is in thousandths: 199 is below a fifth, 200 is not."""
    hardware.jetson(199, place)
    gate = gpu_gate(hardware)
    assert is_open(gate)
    hardware.jetson(200, place)
    reading = gate.check()
    assert reading is not None
    assert reading.detail == "others use 20% of the GPU, the limit is 20%"


def test_a_jetsons_other_engines_are_no_gpu(hardware: Hardware) -> None:
    """The load of the video engine does not count."""
    hardware.jetson(900, "class/devfreq/15340000.vic/device")
    assert TegraMeter.found(hardware.root) is None


def test_a_moment_of_load_is_ignored(hardware: Hardware) -> None:
    """One of five readings is 1 and the others are 0: the mean is a fifth, below the limit of a quarter."""
    hardware.jetson(0)
    gate = gpu_gate(hardware, below=0.25)
    loads = iter([1000, *[0] * READINGS])
    gate.pause = lambda seconds: hardware.jetson(next(loads))
    assert is_open(gate)


def test_own_work_closes_no_gate(hardware: Hardware) -> None:
    """The daemon's own training uses the GPU, or did a moment ago, so the load of others is unknown."""
    hardware.jetson(990)
    assert gpu_gate(hardware, idle_for=lambda: 0.0).check() is None
    assert gpu_gate(hardware, idle_for=lambda: 1.9).check() is None
    assert not is_open(gpu_gate(hardware, idle_for=lambda: 60.0))


def test_work_that_starts_during_a_reading_closes_no_gate(hardware: Hardware) -> None:
    """The reading may be of the daemon's own work."""
    hardware.jetson(990)
    idle_for = iter([60.0, 0.0])
    assert gpu_gate(hardware, idle_for=lambda: next(idle_for)).check() is None
