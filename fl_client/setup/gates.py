"""The owner's gates: whether their sensors are here, and what they say now."""

from __future__ import annotations

import math
import time

from fl_client import device as devices
from fl_client.config import ClientConfig
from fl_client.errors import ConfigError
from fl_client.gates.make import Surroundings, gates_of
from fl_client.gates.panel import Panel
from fl_client.setup.findings import Finding, fail, ok


def look(config: ClientConfig) -> list[Finding]:
    """Nothing where no gate is asked for. A gate that is closed is no fault: a daemon waits for it."""
    around = Surroundings(devices.choose(config.device), idle_for=lambda: math.inf, clock=time.time)
    try:
        panel = Panel(gates_of(config.gates, around), open_after_s=0.0)
    except ConfigError as error:
        return [fail("gates", str(error))]
    if not panel.gates:
        return []
    closed = panel.look()
    said = [f"{each.gate} is closed now, so a daemon would wait: {each.detail}" for each in closed]
    well = [gate for gate in panel.gates if gate not in {each.gate for each in closed}]
    return [ok("gates", "; ".join([*said, *(f"{gate} is open" for gate in well)]))]
