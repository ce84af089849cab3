"""The gates: whether what they look at is on this device, and whether they let it train now."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch

from fl_client.config import ClientConfig
from fl_client.errors import ConfigError
from fl_client.gates.base import Gate, SensorError
from fl_client.gates.make import Surroundings, gates_of
from fl_client.setup.findings import Finding, fail, ok


def look(config: ClientConfig, device: torch.device) -> Iterator[Finding]:
    """One line for each gate; a closed one is no fault, for that is what it is there for."""
    around = Surroundings(device, idle_for=lambda: math.inf, clock=time.time)
    try:
        gates = gates_of(config.gates, around)
    except ConfigError as error:
        yield fail("gates", str(error))
        return
    yield from map(_looked_at, gates)


def _looked_at(gate: Gate) -> Finding:
    try:
        verdict = gate.look()
    except SensorError as error:
        return fail("gates", f"{gate.name}: {error}", "as the user of the service? sudo -u impetus fl-client doctor")
    if verdict is None or verdict.open:
        return ok("gates", f"{gate.name} lets it train")
    return ok("gates", f"{gate.name} is closed now: {verdict.detail}")
