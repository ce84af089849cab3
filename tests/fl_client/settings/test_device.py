"""The device is chosen once, and a missing one is an error."""

from __future__ import annotations

import pytest
import torch

from fl_client.errors import DeviceError
from fl_client.settings import device


def test_auto_takes_what_is_there() -> None:
    """The device "auto" is CUDA if available, otherwise the CPU."""
    assert device.choose("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_missing_cuda_device_is_reported() -> None:
    """No machine has 100 devices: the message names the number of devices and what to set."""
    with pytest.raises(
        DeviceError, match=r'expected a CUDA device for "cuda:98", found .*: set device = "cpu" or "auto"'
    ):
        device.choose("cuda:98")


def test_a_cpu_has_memory_and_a_name() -> None:
    """The coordinator's tables show both."""
    described = device.describe(torch.device("cpu"))
    assert described.kind == "cpu"
    assert described.memory_bytes > 0
    assert described.name
