"""Dict batches with an attention mask in real processes: killed, resumed, simulated and replayed with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import SimulationConfig, SimulationSection
from fl_ops.simulate.simulation import Simulation
from fl_server.run_spec import from_spec
from tests.processes.federation import Coordinator, Daemon, Fleet, run_spec
from tests.processes.process import HERE, Workspace, eventually

TASK = "sequence_task:Counting"
PARTITION: dict[str, Any] = {"method": "iid", "seed": 1}
RUNS: dict[str, dict[str, Any]] = {
    "scaffold": {"algorithm": {"name": "scaffold"}, "population": 3},
    "mimelite": {"algorithm": {"name": "mimelite"}, "local": {"epochs": None, "steps": 6}},
}


class WorkerDaemon(Daemon):
    """A daemon that may start processes of its own."""

    forks = False


class SequenceFleet(Fleet):
    """Three daemons with dict batches. The first one reads its data in worker processes."""

    form = "samples"

    def daemon(self, index: int, size: int) -> Daemon:
        shard = {"partition": {**PARTITION, "clients": size}, "index": index}
        workers = 2 if index == 0 and self.form == "samples" else 0
        kind = WorkerDaemon if workers else Daemon
        options = {"form": self.form, "workers": workers, "kept": 4}
        daemon = kind(self.workspace, self.server, f"edge-{index}", shard=shard)
        task = {"name": TASK, "options": {**options, "hold": str(daemon.hold)}}
        daemon.configure(task=task)
        return daemon


class BatchedFleet(SequenceFleet):
    """Three daemons whose task makes its batches."""

    form = "batched"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        pytest.param(SequenceFleet, "scaffold", id="samples-scaffold"),
        pytest.param(BatchedFleet, "mimelite", id="batched-mimelite"),
        pytest.param(SequenceFleet, "mimelite", id="samples-mimelite"),
        pytest.param(BatchedFleet, "scaffold", id="batched-scaffold"),
    ],
)
def test_a_killed_run_has_the_simulated_bits_and_is_replayed(
    kind: type[SequenceFleet], method: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Coordinator and one daemon are killed in the first round. The models are those of a simulation and a replay."""
    monkeypatch.syspath_prepend(HERE)
    fleet = kind(workspace, 3, tasks=[TASK])
    options = {"form": kind.form, "kept": 4}
    sections = {"task": {"name": TASK, "options": options}, "stop": {"rounds": 3}, **RUNS[method]}
    if kind is BatchedFleet:  # the task's own batches count, whatever the batch size is
        sections["local"] = {**sections.get("local", {}), "batch_size": 3}
    _, slow = fleet.half_delivered(method, evaluation={"clients_every": 3}, **sections)
    slow.kill()
    fleet.server.kill()
    fleet.server.serve()
    slow.start()
    slow.hold.unlink()
    digests = simulated(method, sections)
    assert fleet.server.digests(method) == digests
    assert len(set(digests)) == 3
    check_replay(fleet.server, method, options, tmp_path / "replay.toml")
    check_evaluations(fleet.server, method)
    offers = [fleet.server.client(f"edge-{index}").tasks[0] for index in range(3)]
    own = 4 if kind is BatchedFleet else 0
    assert [(offer.train_examples, offer.eval_examples, offer.train_batches) for offer in offers] == [(26, 4, own)] * 3


def check_evaluations(server: Coordinator, name: str) -> None:
    """The server has evaluated each round, and three clients the last one."""
    eventually(lambda: server.rounds(name)[-1].metrics.get("clients_evaluated") == 3, "the clients have evaluated")
    assert all({"loss", "accuracy"} <= round_.metrics.keys() for round_ in server.rounds(name))


def simulated(name: str, sections: dict[str, Any]) -> list[str]:
    """Digests of the same run, simulated in this process, without workers."""
    section = SimulationSection(clients=3, names="edge-{index}", partition=PARTITION)
    prepared = prepare(SimulationConfig(from_spec(run_spec(name, **sections)), section), 7)
    with Simulation(prepared.config, prepared.clients, task=prepared.server_task) as simulation:
        return [done.digest for done in simulation.rounds()]


def check_replay(server: Coordinator, name: str, options: dict[str, Any], config: Path) -> None:
    """`fl simulate --replay` computes the same models from the ledger."""
    config.write_text(
        f'[task]\nname = "{TASK}"\noptions = {{ form = "{options["form"]}", kept = {options["kept"]} }}\n'
        '[simulation]\nclients = 3\nnames = "edge-{index}"\npartition = { method = "iid", seed = 1 }\n'
    )
    state = str(server.settings["state_dir"])
    result = CliRunner().invoke(app, ["simulate", str(config), "--replay", name, "--state-dir", state])
    assert result.exit_code == 0, result.output
    assert "every model equals the ledger's bit for bit" in result.output
