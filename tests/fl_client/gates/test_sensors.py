"""Power, temperature and GPU, read from folders that are laid out as Linux has them."""

from __future__ import annotations

import pytest

from fl_client.errors import ConfigError
from fl_client.gates.base import SensorError
from fl_client.gates.gpu import READINGS, GpuGate, TegraMeter
from fl_client.gates.power import PowerGate
from fl_client.gates.temperature import Limits, TemperatureGate

ALL_DAY = float("inf")


def is_open(gate):
    """What one look finds."""
    return gate.look().open


def gpu_gate(hardware, below=0.2, idle_for=lambda: ALL_DAY):
    """The gate of a Jetson's GPU, without the pauses between readings."""
    gate = GpuGate(TegraMeter.found(hardware.root), below, idle_for)
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
def test_power(hardware, supplies, expected):
    """One line that supplies is enough; without any line the batteries tell; a mouse's battery is not the device's."""
    for name, files in supplies.items():
        hardware.supply(name, **files)
    assert is_open(PowerGate(hardware.root)) is expected


def test_a_plug_that_is_pulled_is_seen(hardware):
    """The folder is read anew at each look, and the words say what is the matter."""
    hardware.plug(True)
    gate = PowerGate(hardware.root)
    hardware.plug(False)
    assert (is_open(gate), gate.look().detail) == (False, "on battery")
    hardware.plug(True)
    assert is_open(gate)


def test_a_device_without_supplies_is_told_so_at_the_start(hardware):
    """A computer that Linux knows no supply of cannot be asked whether it is on mains."""
    with pytest.raises(
        ConfigError, match="gates.on_mains: expected a power supply in .*/class/power_supply, found none"
    ):
        PowerGate(hardware.root)


def thermometer(hardware, *zones, below=75.0, margin=5.0):
    """A gate of temperature."""
    return TemperatureGate(hardware.root, zones, Limits(below, margin))


def test_temperature_closes_at_the_limit_and_opens_below_the_margin(hardware):
    """At 75.0 it closes, at 70.0 it is still closed, at 69.9 it opens, and at 74.9 it stays open."""
    found = []
    hardware.zone(0, "cpu-thermal", 60_000)
    gate = thermometer(hardware)
    for milli in (74_900, 75_000, 70_000, 69_900, 74_900):
        hardware.zone(0, "cpu-thermal", milli)
        found.append(is_open(gate))
    assert found == [True, False, False, True, True]


def test_the_hottest_zone_decides_and_is_named(hardware):
    """Ten degrees more than the other one."""
    hardware.zone(0, "cpu-thermal", 70_000)
    hardware.zone(1, "gpu-thermal", 80_000)
    assert thermometer(hardware).look().detail == "gpu-thermal at 80 degrees Celsius, the limit is 75"
    assert is_open(thermometer(hardware, "cpu-thermal"))


def test_a_zone_that_measures_nothing_is_passed_over(hardware):
    """Powered down, absurd, or a Jetson's constant 100 degrees."""
    hardware.zone(0, "cpu-thermal", 50_000)
    hardware.zone(1, "cv0-thermal", 0).unlink()
    hardware.zone(2, "off", -274_000)
    hardware.zone(5, "broken", 0x7FFFFFFF)
    hardware.zone(3, "PMIC-Die", 100_000)
    hardware.zone(4, "none", "nan")
    assert is_open(thermometer(hardware))


def test_no_zone_that_can_be_read_is_a_failure(hardware):
    """What has gone after the start is no temperature."""
    file = hardware.zone(0, "cpu-thermal", 50_000)
    gate = thermometer(hardware)
    file.unlink()
    with pytest.raises(SensorError, match=r"expected to read .*thermal_zone0/temp, got No such file"):
        gate.look()


@pytest.mark.parametrize(
    ("zones", "words"),
    [
        ((), "gates.temperature_below: expected a thermal zone in .*, found none"),
        (("gpu",), "gates.temperature_zones: expected types of .*, which are none, got 'gpu'"),
    ],
)
def test_a_device_without_thermometers_is_told_so_at_the_start(hardware, zones, words):
    """What is there is named, and what to do."""
    with pytest.raises(ConfigError, match=words):
        thermometer(hardware, *zones)


@pytest.mark.parametrize(
    "place",
    [
        "class/devfreq/17000000.gpu/device", "class/devfreq/17000000.ga10b/device", "class/devfreq/570000.gm20b/device",
        "devices/platform/gpu.0", "devices/gpu.0",
    ],
)  # fmt: skip
def test_a_jetsons_gpu_is_found_and_read(hardware, place):
    """In thousandths: 199 are below a fifth, 200 are not."""
    hardware.jetson(199, place)
    gate = gpu_gate(hardware)
    assert is_open(gate)
    hardware.jetson(200, place)
    assert gate.look().detail == "others use 20% of the GPU, the limit is 20%"


def test_a_jetsons_other_engines_are_no_gpu(hardware):
    """The video engine has a load too."""
    hardware.jetson(900, "class/devfreq/15340000.vic/device")
    assert TegraMeter.found(hardware.root) is None


def test_a_moment_of_load_is_no_work(hardware):
    """One of the readings of a look is full, the others are nothing: the mean is a fifth, and the limit a quarter."""
    hardware.jetson(0)
    gate = gpu_gate(hardware, below=0.25)
    loads = iter([1000, *[0] * READINGS])
    gate.pause = lambda seconds: hardware.jetson(next(loads))
    assert is_open(gate)


def test_own_work_closes_no_gate(hardware):
    """The whole GPU is busy with our training, or was a moment ago: nothing can be said of others."""
    hardware.jetson(990)
    for seconds in (0.0, 1.9):
        assert gpu_gate(hardware, idle_for=lambda seconds=seconds: seconds).look() is None
    assert not is_open(gpu_gate(hardware, idle_for=lambda: 60.0))


def test_work_that_begins_while_the_gate_looks_closes_none(hardware):
    """What was read may be our own."""
    hardware.jetson(990)
    idle_for = iter([60.0, 0.0])
    assert gpu_gate(hardware, idle_for=lambda: next(idle_for)).look() is None
