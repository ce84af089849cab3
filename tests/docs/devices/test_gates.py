"""docs/devices/gates.md agrees with the gates."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

from fl_client.gates.conditions import PowerGate, TemperatureGate, WindowGate
from fl_client.gates.gate_set import FAILURES
from fl_client.gates.gpu import GpuGate
from fl_client.settings.config import GateName, GatesConfig
from protos.fl.v1.coordinator_pb2 import UnavailableReason

PAGE = (Path(__file__).parents[3] / "docs/devices/gates.md").read_text(encoding="utf-8")


def test_the_example_is_read() -> None:
    """As it stands there, with one value for each gate."""
    (example,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    gates = GatesConfig.model_validate(tomllib.loads(example)["gates"])
    assert (gates.on_mains, gates.temperature_below, gates.gpu_below, len(gates.windows)) == (True, 75.0, 0.2, 2)


def test_every_gate_has_its_line_with_its_reason() -> None:
    """By the names of settings, metrics and wire."""
    kinds = (WindowGate, PowerGate, TemperatureGate, GpuGate)
    lines = dict(re.findall(r"^\| `(\w+)` \|.* \| `(\w+)`[^|]*\|$", PAGE, re.MULTILINE))
    assert lines == {
        kind.name: UnavailableReason.Name(kind.reason).removeprefix("UNAVAILABLE_REASON_") for kind in kinds
    }
    assert lines.keys() == set(get_args(GateName))


def test_the_numbers_are_the_defaults() -> None:
    """Seconds, and readings."""
    defaults = GatesConfig()
    assert f"every `check_s`, {defaults.check_s:g} seconds" in PAGE
    assert (defaults.open_after_s, "for `open_after_s`, a minute" in PAGE) == (60.0, True)
    assert (FAILURES, "From the third in a row on" in PAGE) == (3, True)
    assert (defaults.finish, "in `finish` (by default only `window`)" in PAGE) == (["window"], True)
