"""Dict batches with an attention mask in real processes: killed, resumed, simulated and replayed with the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.federation import Coordinator, Daemon, Fleet
from tests.processes.process import HERE, Workspace, eventually
from tests.processes.simulated import check_replay, simulated_digests

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
    kind: type[SequenceFleet], method: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
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
    digests = simulated_digests(method, **sections)
    assert fleet.server.digests(method) == digests
    assert len(set(digests)) == 3
    check_replay(fleet.server, method, {"name": TASK, "options": options})
    check_evaluations(fleet.server, method)
    offers = [fleet.server.client(f"edge-{index}").tasks[0] for index in range(3)]
    own = 4 if kind is BatchedFleet else 0
    assert [(offer.train_examples, offer.eval_examples, offer.train_batches) for offer in offers] == [(26, 4, own)] * 3


def check_evaluations(server: Coordinator, name: str) -> None:
    """The server has evaluated each round, and three clients the last one."""
    eventually(lambda: server.rounds(name)[-1].metrics.get("clients_evaluated") == 3, "the clients have evaluated")
    assert all({"loss", "accuracy"} <= round_.metrics.keys() for round_ in server.rounds(name))
