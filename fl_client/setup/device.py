"""The device for training: what there is, and why CUDA is not there where it could be."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch

from fl_client import device as devices
from fl_client.config import ClientConfig
from fl_client.errors import DeviceError
from fl_client.setup.findings import Finding, fail, ok, size, warn

_NODES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvmap", "/dev/nvhost-ctrl", "/dev/nvgpu")
_TEGRA = Path("/etc/nv_tegra_release")
_JETSON = "install the torch of NVIDIA's JetPack for this board, see docs/edge.md"
_PC = "install a torch that is built for CUDA: https://pytorch.org/get-started"


def look(config: ClientConfig) -> list[Finding]:
    """What a daemon would train on; a GPU that is there and not used; more threads than cores."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            device = devices.choose(config.device)
        except DeviceError as error:
            why = _no_cuda()
            return [fail("device", str(error), _mend(why) if why else "")]
        except RuntimeError as error:  # torch's own, where the driver fails
            return [fail("device", f"expected {config.device}, got: {error}", _mend(str(error)))]
    found = [ok("device", _described(device))]
    seen = gpu_nodes()
    if device.type == "cpu" and config.device == "auto" and seen:
        why = _no_cuda() or "; ".join(str(each.message) for each in said)
        found = [warn("device", f"expected CUDA, for there is {seen[0]}, got the CPU: {why}", _mend(why)), *found]
    cores = len(os.sched_getaffinity(0))
    if config.threads > cores:
        said_so = f"expected at most {cores} threads, one a core, got threads = {config.threads}"
        found.append(warn("device", said_so, f"set threads = {cores}"))
    return found


def gpu_nodes() -> list[str]:
    """Nodes of NVIDIA's drivers that this machine has."""
    return [node for node in _NODES if Path(node).exists()]


def _described(device: torch.device) -> str:
    about = devices.describe(device)
    built = f"torch {torch.__version__}"
    cores = f", {len(os.sched_getaffinity(0))} cores" if device.type == "cpu" else f", CUDA {torch.version.cuda}"
    return f"{about.kind}: {about.name}{cores}, {size(about.memory_bytes)}, {built}"


def _no_cuda() -> str:
    """Why torch has no CUDA, in torch's or the driver's words."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return ""


def _mend(why: str) -> str:
    if "without CUDA" in why:
        return _JETSON if _TEGRA.exists() else _PC
    if "driver" in why:
        return "nvidia-smi must work first: install or upgrade the driver, and start the device anew"
    return "may this user open the nodes? ls -l /dev/nvidia* /dev/nvmap; a Jetson's are for the groups video and render"
