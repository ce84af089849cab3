"""The task with this device's data, and one step of training on it: what no look at versions can prove."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fl_client import device as devices
from fl_client.config import ClientConfig
from fl_client.data import LocalTask, load_local_task
from fl_client.errors import ConfigError, StartError, StateError
from fl_client.setup.findings import Finding, fail, ok, size, warn
from fl_client.state import StateDir

_BATCH = 8


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of it."""

    findings: list[Finding]
    device: torch.device
    model_bytes: int | None = None
    """Of all that a model says of itself; None where there is no model."""


class _LooksOnly:
    """Reads what a daemon keeps of its shard, and keeps nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def shard(self, asked: dict[str, Any], make: Callable[[], list[int] | None]) -> list[int] | None:
        """As StateDir.shard, without writing."""
        if (self._folder / "shard.json").exists():
            return StateDir(self._folder).shard(asked, make)
        return make()


def look(config: ClientConfig) -> Tried:
    """Load the task and its data, and train one batch as a daemon would."""
    device = devices.choose(config.device)
    torch.set_num_threads(config.threads)
    try:
        local = load_local_task(config, _LooksOnly(config.state_dir), device)
    except StateError as error:
        return Tried([fail("shard", str(error))], device)
    except (ConfigError, StartError, OSError) as error:
        return Tried([fail("task", str(error), _WHERE)], device)
    except RuntimeError as error:
        return Tried([fail("task", f"expected its data on {device}, got: {_first_line(error)}", _KERNEL)], device)
    data = f"{local.name}: {len(local.train)} examples to train on, {len(local.held_out)} to evaluate on"
    return _step(config, local, ok("task", data))


def _step(config: ClientConfig, local: LocalTask, loaded: Finding) -> Tried:
    device = local.train.inputs.device
    try:
        torch.manual_seed(0)
        model = devices.Compute(config.precision, config.memory_format).prepared(local.task.model(), device)
        batch, began = local.train[:_BATCH], time.monotonic()
        loss = local.task.loss(model(batch.inputs), batch.targets)
        loss.backward()
        value = loss.item()
    except Exception as error:  # noqa: BLE001 - the task's code or the driver's: whatever it is, it is told
        said = f"expected a step of training on {device}, got: {_first_line(error)}"
        return Tried([loaded, fail("step", said, _KERNEL)], device)
    model_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    took = 1000 * (time.monotonic() - began)
    said = f"a model of {size(model_bytes)}, its first batch of {len(batch)} took {took:.0f} ms on {device}"
    if math.isfinite(value):
        return Tried([loaded, ok("step", said)], device, model_bytes)
    odd = warn("step", f"expected a finite loss of the first batch, got {value}", "look at the data and at precision")
    return Tried([loaded, odd], device, model_bytes)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


_WHERE = "relative paths count from where the daemon is started: /var/lib/impetus as a service"
_KERNEL = (
    "'no kernel image': torch is not built for this GPU, so take another torch, or device = \"cpu\"; 'out of memory':"
    " another program has it; else it is the task's code"
)
