"""CUDA or CPU, chosen once at the start."""

from __future__ import annotations

import os
import platform

import torch

from fl_client.errors import DeviceError
from protos.fl.v1 import coordinator_pb2


def choose(name: str) -> torch.device:
    """The device of "auto" (the first CUDA device, else the CPU), "cpu", "cuda" or "cuda:1".

    Raises:
        DeviceError: a CUDA device that is not there.
    """
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise DeviceError(
                f'device: expected a CUDA device for "{name}", found {count or "none"}'
                f" ({'torch is built without CUDA' if torch.version.cuda is None else 'see nvidia-smi'}):"
                ' set device = "cpu" or "auto"'
            )
        device = torch.device("cuda", device.index or 0)
    return device


def describe(device: torch.device) -> coordinator_pb2.Device:
    """The device for the coordinator's tables: kind, maker's name, memory in bytes."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return coordinator_pb2.Device(kind="cuda", name=properties.name, memory_bytes=properties.total_memory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return coordinator_pb2.Device(kind="cpu", name=platform.processor() or platform.machine(), memory_bytes=memory)
