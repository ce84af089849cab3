"""A model of bfloat16 in real processes: simulated bits, a killed coordinator, a replay, and the export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import HERE, Workspace
from tests.processes.simulated import check_replay, simulation

PARTITION: dict[str, Any] = {"method": "iid", "seed": 1}
OPTIONS = {"model": "bfloat16"}
METHODS: dict[str, dict[str, Any]] = {
    "scaffold": {"algorithm": {"name": "scaffold"}, "population": 3},
    "fedadam": {"algorithm": {"name": "fedadam"}},
}


@pytest.mark.slow
def test_a_killed_run_has_the_simulated_bits_and_is_replayed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client states and a direction, or adaptive state; the coordinator is killed after two of five rounds."""
    monkeypatch.syspath_prepend(HERE)
    server = Coordinator(workspace).serve()
    for index in range(3):
        shard = {"partition": {**PARTITION, "clients": 3}, "index": index}
        Daemon(workspace, server, f"edge-{index}", options=OPTIONS, shard=shard).start()
    for index in range(3):
        server.until_present(f"edge-{index}")
    for name, method in METHODS.items():
        sections = {"task": {"options": OPTIONS}, "stop": {"rounds": 5}, **method}
        server.create(name, **sections)
        server.until(name, lambda run: run.rounds_done >= 2, "two rounds are done")
        server.kill()
        server.serve()
        with simulation(name, **sections) as again:
            digests, model = [done.digest for done in again.rounds()], again.model()
        assert server.digests(name) == digests
        check_replay(server, name, {"options": OPTIONS})
        check_export(server, name, model)


def check_export(server: Coordinator, name: str, model: dict[str, torch.Tensor]) -> None:
    """The export has the dtypes of the task's model: it can be loaded by `load_state_dict`, and is what clients got."""
    path = server.folder / f"{name}.safetensors"
    result = CliRunner().invoke(
        app, ["export", name, "--out", str(path), "--server", str(server.settings["admin_listen"]), "--insecure"]
    )
    assert result.exit_code == 0, result.output
    exported = load_file(path)
    assert exported["first.weight"].dtype == torch.bfloat16
    assert exported["last.weight"].dtype == torch.float32
    assert exported.keys() == model.keys()
    assert all(torch.equal(exported[key], tensor) for key, tensor in model.items())
