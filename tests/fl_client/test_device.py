"""The device is chosen once, and a missing one is told."""

from __future__ import annotations

import pytest
import torch

from fl_client import device
from fl_client.errors import DeviceError


def test_auto_takes_what_is_there():
    """CUDA where there is one, else the CPU."""
    assert device.choose("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_missing_cuda_device_is_told():
    """No machine has a 99th: the message says how many there are and what to set."""
    with pytest.raises(
        DeviceError, match=r'expected a CUDA device for "cuda:98", found .*: set device = "cpu" or "auto"'
    ):
        device.choose("cuda:98")


def test_a_cpu_has_memory_and_a_name():
    """For the coordinator's tables."""
    described = device.describe(torch.device("cpu"))
    assert described.kind == "cpu"
    assert described.memory_bytes > 0
    assert described.name
