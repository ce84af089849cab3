"""Checks the task with this device's data, by one step of training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fl_client.errors import ConfigError, StartError, StateError
from fl_client.settings import device as devices
from fl_client.settings.config import ClientConfig
from fl_client.setup.doctor.findings import Finding, fail, ok, size, warn
from fl_client.storage.state import StateDir
from fl_client.training.data import LocalTask, load_local_task
from fl_client.training.trial import trial_step
from fl_tasks.building.new_model import new_model
from fl_tasks.errors import TaskError


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The findings, and what other checks need."""

    findings: list[Finding]
    device: torch.device
    model_bytes: int | None = None
    """Size of the model's state. None where there is no model."""


class _ReadOnlyShard:
    """Reads the shard of a state directory, and writes nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def shard(self, configured: dict[str, Any], make: Callable[[], list[int] | None]) -> list[int] | None:
        """See StateDir.shard."""
        if (self._folder / "shard.json").exists():
            return StateDir(self._folder).shard(configured, make)
        return make()


def check(config: ClientConfig) -> TrialResult:
    """Load the task and its data, and train on one batch as a daemon does."""
    device = devices.choose(config.device)
    torch.set_num_threads(config.threads)
    try:
        local = load_local_task(config, _ReadOnlyShard(config.state_dir), device)
    except StateError as error:
        return TrialResult([fail("shard", str(error))], device)
    except (ConfigError, StartError, OSError) as error:
        return TrialResult([fail("task", str(error), _WHERE)], device)
    except RuntimeError as error:
        return TrialResult([fail("task", f"expected its data on {device}, got: {_first_line(error)}", _KERNEL)], device)
    own = f" in {local.train.own_batches} batches" if local.train.own_batches else ""
    data = f"{local.name}: {len(local.train)} examples{own} to train on, {len(local.held_out)} to evaluate on"
    return _step(config, local, ok("task", data))


def _step(config: ClientConfig, local: LocalTask, loaded: Finding) -> TrialResult:
    device = local.device
    try:
        torch.manual_seed(0)
        model = devices.Compute(config.precision, config.memory_format).prepared(new_model(local.task), device)
        trial = trial_step(local.task, local.train, model, device)
    except TaskError as error:
        return TrialResult([loaded, fail("step", str(error))], device)
    except Exception as error:  # noqa: BLE001 - any error of the task's code or the driver is a finding
        message = f"expected a step of training on {device}, got: {_first_line(error)}"
        return TrialResult([loaded, fail("step", message, _KERNEL)], device)
    took = 1000 * trial.seconds
    message = (
        f"a model of {size(trial.model_bytes)}; the first batch of {trial.examples} took {took:.0f} ms on {device}"
    )
    if math.isfinite(trial.loss):
        return TrialResult([loaded, ok("step", message)], device, trial.model_bytes)
    odd = warn("step", f"expected a finite loss of the first batch, got {trial.loss}", "check the data, and precision")
    return TrialResult([loaded, odd], device, trial.model_bytes)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


_WHERE = "relative paths are relative to the daemon's working directory: /var/lib/impetus as a service"
_KERNEL = (
    "'no kernel image': torch is not built for this GPU, so install another torch, or set device = \"cpu\";"
    " 'out of memory': another program uses it; otherwise it is the task's code"
)
