"""The gate of the GPU: open while other programs use less than a share of it.

The driver's library NVML measures the load of NVIDIA's GPUs. The extra `gates` installs its Python package.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fl_client.errors import ConfigError
from fl_client.gates.gate_set import GateReading, SensorError, read_number
from fl_common.extras import install_hint
from protos.fl.v1.coordinator_pb2 import UNAVAILABLE_REASON_DEVICE_BUSY

_NAMESPACE = Path("/proc/self/ns/pid")
_HOST = "pid:[4026531836]"
"""Number of Linux's first process namespace. In another one, process ids differ from the driver's."""
_RECENT_US = 1_500_000


def host_pids() -> bool:
    """Whether the driver knows this process by its own process id."""
    return _NAMESPACE.is_symlink() and str(_NAMESPACE.readlink()) == _HOST


class NvmlMeter:
    """One GPU: the load of other processes where the driver reports it, else the whole load."""

    def __init__(self, device: torch.device, by_process: bool | None = None) -> None:
        """device: a CUDA device. A daemon that trains on the CPU measures the first GPU.

        by_process: whether the driver knows this process by its id. None: detect it.

        Raises:
            ConfigError: the package, the driver or the GPU is missing, or the GPU reports no load.
        """
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            raise ConfigError(
                "gates.gpu_below: expected the package nvidia-ml-py, which reads the driver, found none: "
                f"{install_hint('gates')}, or remove gpu_below"
            ) from None
        self.others_only = False
        """Whether the load is without this daemon's work."""
        try:
            self._nvml.nvmlInit()
            self._gpu = self._handle(device)
            self.others_only = (host_pids() if by_process is None else by_process) and self._reports_processes()
            self.share()
        except (self._nvml.NVMLError, SensorError) as error:
            raise ConfigError(
                f"gates.gpu_below: expected a GPU with a driver that reports its load, got: {error}; see nvidia-smi, or"
                " remove gpu_below"
            ) from None

    def share(self) -> float:
        """The load of the last fraction of a second, from 0 to 1. Raises SensorError."""
        try:
            if self.others_only:
                return min(1.0, float(sum(sample.smUtil for sample in self._others())) / 100)
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu) / 100
        except self._nvml.NVMLError as error:
            raise SensorError(f"expected the GPU's load from the driver, got: {error}") from None

    def _handle(self, device: torch.device) -> Any:
        """The handle by the UUID: with CUDA_VISIBLE_DEVICES, torch's device numbers differ from the driver's."""
        if device.type != "cuda":
            return self._nvml.nvmlDeviceGetHandleByIndex(0)
        uuid = torch.cuda.get_device_properties(device).uuid
        return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def _reports_processes(self) -> bool:
        try:
            self._others()
        except self._nvml.NVMLError:
            return False
        return True

    def _others(self) -> list[Any]:
        """The latest sample of each other process that has used the GPU recently."""
        since = int(time.time() * 1e6) - _RECENT_US
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._gpu, since)
        except self._nvml.NVMLError as error:
            if error.value in (self._nvml.NVML_SUCCESS, self._nvml.NVML_ERROR_NOT_FOUND):
                return []  # no process has used it since
            raise
        # Some drivers report impossible loads of processes that have just ended.
        return [sample for sample in samples if sample.pid != os.getpid() and sample.smUtil <= 100]


READINGS, APART_S = 5, 0.2
"""Readings of one check: a driver reports the last fraction of a second, in which a moved window looks like work."""
QUIET_S = 2.0
"""Seconds after the daemon's own work, from which on the whole load is that of other programs."""
_TEGRA = (
    "class/devfreq/*.gpu/device/load", "class/devfreq/*.g[amvp][0-9]*b/device/load",
    "devices/platform/gpu.0/load", "devices/gpu.0/load",
)  # fmt: skip
"""Files with the load of a Jetson's GPU, the newer models first."""


class GpuGate:
    """Open while the mean of several readings is below the limit."""

    name = "gpu"
    reason = UNAVAILABLE_REASON_DEVICE_BUSY
    debounced = True

    def __init__(self, meter: NvmlMeter | TegraMeter, below: float, idle_for: Callable[[], float]) -> None:
        """below: a share of 1. idle_for: seconds since this daemon computed, 0 while it does."""
        self._meter = meter
        self._below = below
        self._idle_for = idle_for
        self.pause: Callable[[float], None] = time.sleep

    def check(self) -> GateReading | None:
        """See Gate. A meter that includes the daemon's own work gives no information during that work."""
        if self._own_work(QUIET_S):
            return None
        readings: list[float] = []
        for _ in range(READINGS):
            readings.append(self._meter.share())
            self.pause(APART_S)
        if self._own_work(QUIET_S + READINGS * APART_S):
            return None  # own work began during the readings
        share = sum(readings) / len(readings)
        detail = f"others use {share:.0%} of the GPU, the limit is {self._below:.0%}"
        return GateReading(share < self._below, detail if share >= self._below else "")

    def _own_work(self, seconds: float) -> bool:
        """Whether the load of the last `seconds` may be the daemon's own."""
        return not self._meter.others_only and self._idle_for() < seconds


class TegraMeter:
    """A Jetson's GPU. Linux reports its load in thousandths."""

    others_only = False

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def found(cls, root: Path) -> TegraMeter | None:
        """The device's meter below `root`, which is /sys. None where there is none."""
        paths = (path for pattern in _TEGRA for path in sorted(root.glob(pattern)))
        return next((cls(path) for path in paths if path.is_file()), None)

    def share(self) -> float:
        """The load of the last fraction of a second, from 0 to 1. Raises SensorError."""
        return read_number(self._path) / 1000
