"""A data set partitioned among simulated clients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_ops.simulate.clients import Parts, PreparedRun, SimulatedClients, prepare
from fl_ops.simulate.settings import parse_simulation
from fl_tasks import Examples, Shard, TaskError
from tests.fl_ops.points import Points
from tests.fl_ops.simulate.conftest import MakeTable


def prepared(table: MakeTable, seed: int = 0, **sections: Any) -> PreparedRun:
    """The run with these sections, and its clients."""
    return prepare(parse_simulation(table(**sections)), seed)


@pytest.mark.parametrize(("part", "left"), [(0.0, 120), (0.25, 92)], ids=["views", "loaded-one-by-one"])
def test_a_client_has_the_data_of_its_daemon(table: MakeTable, part: float, left: int) -> None:
    """Examples, held-out data and their order are those of the task for the same indices, cut from memory or loaded.

    Of 30 examples each, floor(30 / 4) = 7 are held out: 4 * 23 = 92 are left to train on.
    """
    run = prepared(table, task={"options": {"part": part}})
    task: Any = run.clients.task
    clients: Any = run.clients
    assert list(clients) == ["c0", "c1", "c2", "c3"]
    for client in clients:
        shard = Shard(clients._parts[client])
        assert torch.equal(clients[client].train.inputs, task.train_data(shard).inputs)
        assert torch.equal(clients[client].held_out.targets, task.eval_data(shard).targets)
    assert clients.num_examples == left


def test_no_client_has_validation_examples(table: MakeTable) -> None:
    """One in five of each class is for evaluation only; the clients have all others."""
    run: Any = prepared(table, simulation={"validation_every": 5})
    held = torch.cat([run.clients[client].train.inputs for client in run.clients])
    validation = run.server_task.eval_data().inputs
    assert (len(held), len(validation)) == (96, 24)
    assert not any((held == one).all(dim=1).any() for one in validation)


def _inputs(run: Any) -> Tensor:
    """Of the first client."""
    inputs: Tensor = run.clients["c0"].train.inputs
    return inputs


def test_a_seed_changes_the_partition_unless_it_has_its_own(table: MakeTable) -> None:
    """Without partition.seed the run's seed decides; with it, every run has the same shards."""
    free, fixed = {"partition": {"method": "iid"}}, {"partition": {"method": "iid", "seed": 3}}
    one, other = (_inputs(prepared(table, seed, simulation=free)) for seed in (1, 2))
    assert not torch.equal(one, other)
    one, other = (_inputs(prepared(table, seed, simulation=fixed)) for seed in (1, 2))
    assert torch.equal(one, other)


def test_objectives_by_examples_know_the_sum(table: MakeTable) -> None:
    """population_examples is the number of examples of all clients, if the method's objective needs it."""
    parameters = {"objective": "examples"}
    run = prepared(table, algorithm={"name": "scaffold", "parameters": parameters})
    assert (run.config.population, run.config.population_examples) == (4, 120)
    assert prepared(table).config.population_examples == 0


def test_too_many_clients(table: MakeTable) -> None:
    """There cannot be more clients than examples."""
    with pytest.raises(TaskError, match="at least one example for each of 121 clients"):
        prepared(table, simulation={"clients": 121})


def test_parts_are_views_of_one_tensor() -> None:
    """Each client has its indices, also an empty part, and no memory of its own."""
    parts = Parts(["a", "b", "c"], [torch.tensor([5, 1]), torch.tensor([], dtype=torch.int64), torch.tensor([2])])
    assert {client: part.tolist() for client, part in parts.items()} == {"a": [5, 1], "b": [], "c": [2]}
    assert ([len(parts[client]) for client in parts], parts.num_indices) == ([2, 0, 1], 3)
    assert parts["a"].untyped_storage().data_ptr() == parts["c"].untyped_storage().data_ptr()


class _Kept(Points):
    """Counts how often it reads, and reads once if it keeps its files."""

    version = "1"
    reads = 0
    kept = False

    def keep_files(self, keep: bool) -> None:
        self.kept = keep

    def train_data(self, shard: Shard) -> Examples:
        self.reads += not self.kept
        return super().train_data(shard)


@pytest.mark.parametrize(("part", "kept"), [(0.0, False), (0.25, True)], ids=["cut", "loaded"])
def test_a_task_keeps_its_files_as_long_as_shards_are_loaded(part: float, kept: bool) -> None:
    """Nothing is read from files while shards are loaded. Where they are cut from memory, the files are forgotten."""
    task = _Kept(part)
    clients = SimulatedClients("kept", task, dict(zip("ab", torch.arange(120).split(60), strict=True)))
    for _ in range(3):
        assert [len(clients[client].train) for client in clients] == [60 - int(60 * part)] * 2
        assert [clients.has_held_out(client) for client in clients] == [part > 0] * 2
    assert (task.reads, task.kept, clients._loaded) == (0, kept, {})
