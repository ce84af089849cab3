"""Checks the training device, and explains why CUDA is missing on a device with a GPU."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from fl_client.errors import DeviceError
from fl_client.settings import device as devices
from fl_client.settings.config import ClientConfig
from fl_client.setup.doctor.findings import Finding, fail, ok, size, warn

_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvmap", "/dev/nvhost-ctrl", "/dev/nvgpu")
_TEGRA = Path("/etc/nv_tegra_release")
_JETSON = "install the torch of NVIDIA's JetPack for this board, see docs/devices/edge.md"
_PC = "install a torch that is built for CUDA: https://pytorch.org/get-started"


def check(config: ClientConfig) -> list[Finding]:
    """Check the device, an unused GPU, and more threads than cores."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            device = devices.choose(config.device)
        except DeviceError as error:
            why = _no_cuda()
            return [fail("device", str(error), _fix(why) if why else "")]
        except RuntimeError as error:  # from torch, where the driver fails
            return [fail("device", f"expected {config.device}, got: {error}", _fix(str(error)))]
    found = [ok("device", _described(device))]
    nodes = gpu_nodes()
    if device.type == "cpu" and config.device == "auto" and nodes:
        why = _no_cuda() or "; ".join(str(each.message) for each in caught)
        found = [warn("device", f"expected CUDA because of {nodes[0]}, got the CPU: {why}", _fix(why)), *found]
    cores = len(os.sched_getaffinity(0))
    if config.threads > cores:
        message = f"expected at most {cores} threads, one per core, got threads = {config.threads}"
        found.append(warn("device", message, f"set threads = {cores}"))
    return found


def gpu_nodes() -> list[str]:
    """Device nodes of NVIDIA's drivers on this machine."""
    return [node for node in _NODES if Path(node).exists()]


def _described(device: torch.device) -> str:
    about = devices.describe(device)
    built = f"torch {torch.__version__}"
    cores = f", {len(os.sched_getaffinity(0))} cores" if device.type == "cpu" else f", CUDA {torch.version.cuda}"
    return f"{about.kind}: {about.name}{cores}, {size(about.memory_bytes)}, {built}"


def _no_cuda() -> str:
    """The reason why torch has no CUDA, as torch or the driver reports it."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return ""


def _fix(why: str) -> str:
    if "without CUDA" in why:
        return _JETSON if _TEGRA.exists() else _PC
    if "driver" in why:
        return "nvidia-smi must work first: install or upgrade the driver, and reboot the device"
    return "check the permissions: ls -l /dev/nvidia* /dev/nvmap; a Jetson's nodes need the groups video and render"
