"""The GPU's load from NVIDIA's package: its real code with a test library in place of the driver."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_client.errors import ConfigError
from fl_client.gates import gpu
from fl_client.gates.gpu import NvmlMeter

PACKAGE = importlib.util.find_spec("pynvml") is not None


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Gives the meter's reading of a case, from our library in place of the driver's."""
    if not PACKAGE:
        pytest.skip("nvidia-ml-py is not installed here")
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler here")
    library = tmp_path / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    pynvml: Any = importlib.import_module("pynvml")
    monkeypatch.setattr(pynvml, "nvmlLib", CDLL(str(library)))
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setenv("NVML_FAKE", str(tmp_path / "case"))

    def reading(case: str) -> str:
        (tmp_path / "case").write_text(case.removeprefix("inside ").replace(";", "\n"))
        meter = NvmlMeter(torch.device("cpu"), not case.startswith("inside "))
        return f"{meter.others_only} {meter.share()}"

    return reading


def test_the_drivers_readings_become_a_share(reading: Callable[[str], str]) -> None:
    """The load of other processes is summed without ours. If processes are unknown, it is the whole load.

    30 % and 15 % are 0.45. No process is 0. Twice 90 % is at most 1, and impossible values are ignored. The whole load,
    40 %, counts if the driver reports no processes, or reports process ids of the host to a container.
    """
    cases = (
        "gpu 90;pid 17 30;pid 0 45;pid 18 15", "gpu 90", "pid 17 90;pid 18 90", "pid 17 5;pid 18 4000000000",
        "gpu 40;refuses", "inside gpu 40;pid 17 30",
    )  # fmt: skip
    assert [reading(case) for case in cases] == [
        "True 0.45",
        "True 0.0",
        "True 1.0",
        "True 0.05",
        "False 0.4",
        "False 0.4",
    ]


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the package to install or the setting to remove."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(
        ConfigError, match=r"gates.gpu_below: expected the package nvidia-ml-py.* 'impetus-fl\[gates\]'"
    ):
        NvmlMeter(torch.device("cpu"))


@pytest.mark.skipif(not PACKAGE, reason="nvidia-ml-py is not installed here")
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a driver")
def test_a_missing_driver_is_an_error() -> None:
    """The message has NVIDIA's text and the remedy."""
    with pytest.raises(
        ConfigError, match=r"gates.gpu_below: expected a GPU with a driver that reports its load, got: .* nvidia-smi"
    ):
        NvmlMeter(torch.device("cpu"))


@pytest.mark.skipif(not (PACKAGE and torch.cuda.is_available()), reason="no NVIDIA GPU here, or no nvidia-ml-py")
def test_a_real_gpu_reports_its_load() -> None:
    """It is found by torch's UUID, and its load is between 0 and 1."""
    meter = NvmlMeter(torch.device("cuda", 0))
    assert 0.0 <= meter.share() <= 1.0


def test_a_container_is_known_by_its_namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only in the initial process namespace are the driver's process ids ours."""
    for number, expected in (("4026531836", True), ("4026532201", False)):
        link = tmp_path / number
        link.symlink_to(f"pid:[{number}]")
        monkeypatch.setattr(gpu, "_NAMESPACE", link)
        assert gpu.host_pids() is expected
    monkeypatch.setattr(gpu, "_NAMESPACE", tmp_path / "no-proc")
    assert gpu.host_pids() is False
