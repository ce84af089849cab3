"""Daemons on a GPU beside one on the CPU: kills, encodings, the doctor. Skipped without CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from tests.processes.federation import Coordinator, Daemon, Fleet
from tests.processes.process import HERE, Workspace, eventually
from tests.processes.simulated import simulation

DEVICE = "cuda"
RUNS: dict[str, dict[str, Any]] = {
    "fedcm": {},
    "scaffold-int8": {
        "algorithm": {"name": "scaffold"},
        "population": 3,
        "encodings": {"update": "int8", "model": "bf16", "direction": "bf16"},
    },
}

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]


class CudaDaemon(Daemon):
    """A daemon that may use CUDA: a program of its own, because CUDA does not work in forked processes."""

    forks = False


class MixedFleet(Fleet):
    """A daemon on the CPU, and two on the GPU, the first of them in bfloat16."""

    def daemon(self, index: int, size: int) -> Daemon:
        shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
        daemon = CudaDaemon(self.workspace, self.server, f"edge-{index}", shard=shard)
        devices = [{"device": "cpu"}, {"device": DEVICE, "precision": "bfloat16"}, {"device": DEVICE}]
        daemon.configure(**devices[index])
        return daemon


@pytest.fixture(scope="module")
def mixed(module_workspace: Workspace) -> MixedFleet:
    """A fleet for all tests of this file."""
    return MixedFleet(module_workspace, 3)


@pytest.mark.parametrize("name", RUNS)
def test_a_killed_run_comes_near_the_model_of_cpus(
    mixed: MixedFleet, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The coordinator is killed, then a daemon on the GPU with its update trained and not sent; none is made twice."""
    monkeypatch.syspath_prepend(HERE)
    sections = {**RUNS[name], "stop": {"rounds": 4}}
    _, slow = mixed.half_delivered(name, **sections)
    assert slow.settings["device"] == DEVICE
    mixed.server.kill()
    slow.hold.unlink()
    kept = Path(slow.settings["state_dir"])
    eventually(lambda: list(kept.glob("**/*.update")), "its update is saved")
    slow.kill()
    mixed.server.serve()
    slow.start()
    mixed.server.completed(name)
    assert len(slow.events("trained", run=name, round=0)) == 1
    with simulation(name, **sections) as on_cpus:  # in float32
        list(on_cpus.rounds())
        expected = on_cpus.model()
    found = exported(mixed.server, name, tmp_path / "model.safetensors")
    distance = sum(float((found[key] - expected[key]).square().sum()) for key in expected) ** 0.5
    assert distance < 0.05 * sum(float(value.square().sum()) for value in expected.values()) ** 0.5


def test_the_clients_name_their_devices(mixed: MixedFleet) -> None:
    """An operator sees the kind and the product of each device."""
    devices = [mixed.server.client(f"edge-{index}").device for index in range(3)]
    assert [device.kind for device in devices] == ["cpu", "cuda", "cuda"]
    assert devices[2].name == torch.cuda.get_device_name()
    assert devices[2].memory_bytes > 2**30


def test_the_doctor_trains_a_batch_on_the_gpu(mixed: MixedFleet) -> None:
    """It may run beside the daemon."""
    command = [sys.executable, "-m", "fl_client", "doctor", "--config", str(mixed["edge-1"].config)]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=HERE, env=mixed["edge-1"].environment()
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "on cuda" in result.stdout


def exported(server: Coordinator, name: str, path: Path) -> dict[str, torch.Tensor]:
    """The last model of the coordinator's run."""
    address = str(server.settings["admin_listen"])
    result = CliRunner().invoke(app, ["export", name, "--out", str(path), "--server", address, "--insecure"])
    assert result.exit_code == 0, result.output
    return load_file(path)
