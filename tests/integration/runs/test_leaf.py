"""FEMNIST by writer in real processes: each device is one writer, and the run is the simulated one."""

from __future__ import annotations

from typing import Any

import pytest

from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import SimulationConfig, SimulationSection
from fl_ops.simulate.simulation import Simulation
from fl_server.run_settings.spec import from_spec
from tests.fl_tasks.built_in.leaf import WRITERS, write_femnist
from tests.processes.federation import Coordinator, Daemon, run_spec
from tests.processes.process import Workspace

SECTIONS: dict[str, Any] = {
    "task": {"name": "femnist", "options": {"model": "cnn-small"}},
    "algorithm": {"name": "scaffold"},
    "population": 3,
    "evaluation": {"every": 1, "clients_every": 1},
    "stop": {"rounds": 2},
}


def simulated(root: str) -> list[tuple[str, dict[str, float]]]:
    """Digest and metrics of each round of the run, simulated in this process."""
    run = from_spec(run_spec("leaf", **SECTIONS))
    options = {**run.task.options, "data_root": root}
    run = run.model_copy(update={"task": run.task.model_copy(update={"options": options})})
    section = SimulationSection(names="edge-{index}", partition={"method": "natural"})
    prepared = prepare(SimulationConfig(run, section), run.seed)
    with Simulation(prepared.config, prepared.clients, task=prepared.server_task) as simulation:
        return [(done.digest or "", dict(done.metrics)) for done in simulation.rounds()]


@pytest.mark.slow  # test_simulation has this claim for other tasks
def test_a_run_of_devices_with_a_writer_each_is_the_simulated_one(workspace: Workspace) -> None:
    """Shards by the index of a natural partition and by the writer's name give the models of one client a writer."""
    root = write_femnist(workspace.folder / "leaf")
    own = {"data_root": root, "model": "cnn-small"}
    server = Coordinator(workspace, settings={"task_options": {"femnist": {"data_root": root}}}).serve()
    for index, writer in enumerate(WRITERS):
        shard: dict[str, Any] = {"shard": {"partition": {"method": "natural"}, "index": index}}
        by_name = index == 1
        task = {"name": "femnist", "options": {**own, **({"user": writer} if by_name else {})}}
        Daemon(workspace, server, f"edge-{index}", task=task, **({} if by_name else shard)).start()
    server.until_present(*(f"edge-{index}" for index in range(3)))
    offered = [server.client(f"edge-{index}").tasks[0] for index in range(3)]
    assert [(offer.train_examples, offer.eval_examples) for offer in offered] == list(WRITERS.values())
    server.create("leaf", **SECTIONS)
    server.completed("leaf")
    networked = [(done.model_digest, dict(done.metrics)) for done in server.rounds("leaf")]
    assert networked == simulated(root)
