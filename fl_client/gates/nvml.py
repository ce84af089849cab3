"""NVIDIA's own word on its GPUs, through the driver's library; the package for it is the extra `gates`."""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

import torch

from fl_client.errors import ConfigError
from fl_client.gates.base import SensorError

_NAMESPACE = Path("/proc/self/ns/pid")
_HOST = "pid:[4026531836]"
"""Linux's first namespace of processes always has this number. In another one the driver's numbers are not ours."""
_RECENT_US = 1_500_000


def host_pids() -> bool:
    """Whether this process has the number that the driver knows it by."""
    return _NAMESPACE.is_symlink() and str(_NAMESPACE.readlink()) == _HOST


class NvmlMeter:
    """One GPU: the other processes' share of it where the driver tells it, else the whole load."""

    def __init__(self, device: torch.device, apart: bool | None = None) -> None:
        """device: a CUDA device; on a daemon that trains on the CPU, the first GPU is meant.

        apart: whether this process can be told from others by its number. None: see.

        Raises:
            ConfigError: the package, the driver or the GPU is missing, or the GPU tells no load.
        """
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            raise ConfigError(
                "gates.gpu_below: expected the package nvidia-ml-py, which asks the driver, found none: install"
                ' "impetus-fl[gates]", or remove gpu_below'
            ) from None
        self.others_only = False
        try:
            self._nvml.nvmlInit()
            self._gpu = self._handle(device)
            self.others_only = (host_pids() if apart is None else apart) and self._tells_processes()
            self.share()
        except (self._nvml.NVMLError, SensorError) as error:
            raise ConfigError(
                f"gates.gpu_below: expected a GPU whose driver tells its load, got: {error}; see nvidia-smi, or remove"
                " gpu_below"
            ) from None

    def share(self) -> float:
        """See Meter."""
        try:
            if self.others_only:
                return min(1.0, sum(sample.smUtil for sample in self._others()) / 100)
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu) / 100
        except self._nvml.NVMLError as error:
            raise SensorError(f"expected the GPU's load from the driver, got: {error}") from None

    def _handle(self, device: torch.device) -> Any:
        """By its UUID: CUDA_VISIBLE_DEVICES gives torch other numbers than the driver has."""
        if device.type != "cuda":
            return self._nvml.nvmlDeviceGetHandleByIndex(0)
        uuid = torch.cuda.get_device_properties(device).uuid
        return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def _tells_processes(self) -> bool:
        try:
            self._others()
        except self._nvml.NVMLError:
            return False
        return True

    def _others(self) -> list[Any]:
        """The latest sample of each other process that has used the GPU just now."""
        since = int(time.time() * 1e6) - _RECENT_US
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(self._gpu, since)
        except self._nvml.NVMLError as error:
            if error.value in (self._nvml.NVML_SUCCESS, self._nvml.NVML_ERROR_NOT_FOUND):
                return []  # nobody has used it since
            raise
        # Drivers are known to report processes that have just ended with loads that cannot be.
        return [sample for sample in samples if sample.pid != os.getpid() and sample.smUtil <= 100]
