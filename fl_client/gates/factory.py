"""Makes the configured gates. Each checks at the start that the device has its sensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zoneinfo import ZoneInfo

import torch

from fl_client.gates.base import Gate
from fl_client.gates.gpu import GpuGate, LoadMeter, NvmlMeter, TegraMeter
from fl_client.gates.power import PowerGate
from fl_client.gates.temperature import Limits, TemperatureGate
from fl_client.gates.window import WindowGate
from fl_client.settings.config import GatesConfig
from fl_client.settings.schedule import Schedule


@dataclass(frozen=True, slots=True)
class HostState:
    """The inputs of the gates in addition to the device's sensors."""

    device: torch.device
    """The device that trains."""
    idle_for: Callable[[], float]
    """Seconds since this daemon computed, 0 while it does."""
    clock: Callable[[], float]
    """Unix seconds."""


def make_gates(config: GatesConfig, host: HostState) -> list[Gate]:
    """The gates, in the order in which their reasons are reported.

    Raises:
        ConfigError: a gate's sensor is not on this device.
    """
    gates: list[Gate] = []
    if config.temperature_below is not None:
        limits = Limits(config.temperature_below, config.temperature_margin)
        gates.append(TemperatureGate(config.sysfs, config.temperature_zones, limits))
    if config.on_mains:
        gates.append(PowerGate(config.sysfs))
    if config.gpu_below is not None:
        gates.append(GpuGate(_meter(config.sysfs, host.device), config.gpu_below, host.idle_for))
    if config.windows:
        zone = ZoneInfo(config.timezone) if config.timezone else None
        gates.append(WindowGate(Schedule(config.windows, zone), config.timezone, host.clock))
    return gates


def _meter(root: Path, device: torch.device) -> LoadMeter:
    """A Jetson's driver has NVML too, but reports no load there."""
    return TegraMeter.found(root) or NvmlMeter(device)
