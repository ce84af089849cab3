"""The load of NVIDIA's GPUs, from the driver's library NVML. The extra `gates` installs its Python package."""

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
                "gates.gpu_below: expected the package nvidia-ml-py, which reads the driver, found none: install"
                ' "impetus-fl[gates]", or remove gpu_below'
            ) from None
        self.others_only = False
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
        """See LoadMeter."""
        try:
            if self.others_only:
                return min(1.0, float(sum(sample.smUtil for sample in self._others())) / 100)
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu) / 100
        except self._nvml.NVMLError as error:
            raise SensorError(f"expected the GPU's load from the driver, got: {error}") from None

    def _handle(self, device: torch.device) -> Any:
        """By UUID: with CUDA_VISIBLE_DEVICES, torch's device numbers differ from the driver's."""
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
