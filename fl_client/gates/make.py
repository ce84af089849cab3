"""The gates that settings ask for, each of them checked against the device: what is missing is told at the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zoneinfo import ZoneInfo

import torch

from fl_client.config import GatesConfig
from fl_client.gates.base import Gate
from fl_client.gates.gpu import GpuGate, Meter, TegraMeter
from fl_client.gates.nvml import NvmlMeter
from fl_client.gates.power import PowerGate
from fl_client.gates.schedule import Schedule
from fl_client.gates.temperature import Limits, TemperatureGate
from fl_client.gates.window import WindowGate


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the gates of a daemon look at beside the device's sensors."""

    device: torch.device
    """What it trains on."""
    idle_for: Callable[[], float]
    """Seconds since it computed, 0 while it does."""
    clock: Callable[[], float]
    """Unix seconds."""


def gates_of(config: GatesConfig, around: Surroundings) -> list[Gate]:
    """The gates in the order in which the most urgent is told first.

    Raises:
        ConfigError: what a gate looks at is not on this device.
    """
    gates: list[Gate] = []
    if config.temperature_below is not None:
        limits = Limits(config.temperature_below, config.temperature_margin)
        gates.append(TemperatureGate(config.sysfs, config.temperature_zones, limits))
    if config.on_mains:
        gates.append(PowerGate(config.sysfs))
    if config.gpu_below is not None:
        gates.append(GpuGate(_meter(config.sysfs, around.device), config.gpu_below, around.idle_for))
    if config.windows:
        zone = ZoneInfo(config.timezone) if config.timezone else None
        gates.append(WindowGate(Schedule(config.windows, zone), config.timezone, around.clock))
    return gates


def _meter(root: Path, device: torch.device) -> Meter:
    """A Jetson's driver has NVML too, but tells it no load."""
    return TegraMeter.found(root) or NvmlMeter(device)
