"""Checks whether the device has the sensors of its gates, and which gates are closed now."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch

from fl_client.errors import ConfigError
from fl_client.gates.base import Gate, SensorError
from fl_client.gates.factory import HostState, make_gates
from fl_client.settings.config import ClientConfig
from fl_client.setup.doctor.findings import Finding, fail, ok


def check(config: ClientConfig, device: torch.device) -> Iterator[Finding]:
    """One finding for each gate. A closed gate is no failure."""
    host = HostState(device, idle_for=lambda: math.inf, clock=time.time)
    try:
        gates = make_gates(config.gates, host)
    except ConfigError as error:
        yield fail("gates", str(error))
        return
    yield from map(_checked, gates)


def _checked(gate: Gate) -> Finding:
    try:
        reading = gate.check()
    except SensorError as error:
        return fail(
            "gates", f"{gate.name}: {error}", "run this as the service's user: sudo -u impetus fl-client doctor"
        )
    if reading is None or reading.open:
        return ok("gates", f"{gate.name} is open")
    return ok("gates", f"{gate.name} is closed now: {reading.detail}")
