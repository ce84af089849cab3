"""Clients of unequal sizes: networked runs of both objectives have the bits of the simulated ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_ops.simulate.clients import SimulatedClients
from fl_ops.simulate.simulation import Simulation
from fl_server.run_settings.spec import from_spec
from fl_tasks.partitioning.file import Partition, save_partition
from fl_tasks.partitioning.spec import PartitionSpec
from tests.processes.federation import Coordinator, Daemon, run_spec
from tests.processes.process import HERE, Workspace
from tests.processes.quadratic_task import EXAMPLES, Quadratic

TASK = "quadratic_task:Quadratic"
PARTS = {f"edge-{i}": part for i, part in enumerate(torch.arange(EXAMPLES).split([2, 5, 17]))}


@pytest.mark.slow
def test_unequal_clients_have_the_simulated_bits(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """SCAFFOLD and FedDyn, both objectives, with the sum of the examples given for each."""
    monkeypatch.syspath_prepend(HERE)
    file = workspace.folder / "parts.json"
    save_partition(file, Partition(PartitionSpec("iid", 3), EXAMPLES, list(PARTS.values())))
    server = Coordinator(workspace).serve()
    for index, name in enumerate(PARTS):
        Daemon(workspace, server, name, shard={"file": str(file), "index": index}, task={"name": TASK}).start()
    for name in PARTS:
        server.until_present(name)
    for method, parameters in (("scaffold", {}), ("feddyn", {"alpha": 1.0})):
        for objective in ("uniform", "examples"):
            name = f"{method}-{objective}"
            algorithm = {"name": method, "parameters": {**parameters, "objective": objective}}
            sections: dict[str, Any] = {
                "task": {"name": TASK}, "algorithm": algorithm, "population": 3, "population_examples": EXAMPLES,
                "local": {"epochs": 8, "batch_size": EXAMPLES, "learning_rate": 0.1}, "stop": {"rounds": 6},
            }  # fmt: skip
            server.create(name, **sections)
            config = from_spec(run_spec(name, **sections))
            with Simulation(config, SimulatedClients(TASK, Quadratic(), PARTS)) as simulation:
                expected = [done.digest for done in simulation.rounds()]
            assert server.digests(name) == expected
