"""A data set dealt to simulated clients."""

from __future__ import annotations

import pytest
import torch

from fl_ops.simulate.clients import deal
from fl_ops.simulate.settings import parse_plan
from tasks import Shard, TaskError


def dealt(table, seed=0, **sections):
    """The clients of the run with these sections."""
    return deal(parse_plan(table(**sections)), seed)


@pytest.mark.parametrize(("part", "left"), [(0.0, 120), (0.25, 92)], ids=["views", "loaded-one-by-one"])
def test_a_client_holds_what_its_daemon_would(table, part, left):
    """Examples, held-out part and order are those of the task for the same indices, however they were cut out.

    Of 30 examples each, floor(30 / 4) = 7 are held out: 4 * 23 = 92 are left to train on.
    """
    run = dealt(table, task={"options": {"part": part}})
    task, clients = run.clients.task, run.clients
    assert list(clients) == ["c0", "c1", "c2", "c3"]
    for client in clients:
        shard = Shard(clients._parts[client])
        assert torch.equal(clients[client].train.inputs, task.train_data(shard).inputs)
        assert torch.equal(clients[client].held_out.targets, task.eval_data(shard).targets)
    assert clients.num_examples == left


def test_validation_examples_are_nobodys(table):
    """One in five of each class is evaluated on and dealt to no client; all others are dealt."""
    run = dealt(table, simulation={"validation_every": 5})
    held = torch.cat([run.clients[client].train.inputs for client in run.clients])
    looked_at = run.evaluated.eval_data().inputs
    assert (len(held), len(looked_at)) == (96, 24)
    assert not any((held == one).all(dim=1).any() for one in looked_at)


def test_a_seed_deals_anew_unless_the_partition_has_its_own(table):
    """Without partition.seed the run's seed deals; with it, every run has the same shards."""
    free, fixed = {"partition": {"method": "iid"}}, {"partition": {"method": "iid", "seed": 3}}
    one, other = (dealt(table, seed, simulation=free).clients["c0"].train.inputs for seed in (1, 2))
    assert not torch.equal(one, other)
    one, other = (dealt(table, seed, simulation=fixed).clients["c0"].train.inputs for seed in (1, 2))
    assert torch.equal(one, other)


def test_objectives_by_examples_know_the_sum(table):
    """population_examples is the examples of all clients together, where the method's objective asks for it."""
    parameters = {"objective": "examples"}
    run = dealt(table, algorithm={"name": "scaffold", "parameters": parameters})
    assert (run.config.population, run.config.population_examples) == (4, 120)
    assert dealt(table).config.population_examples == 0


def test_too_many_clients(table):
    """More clients than examples cannot be dealt to."""
    with pytest.raises(TaskError, match="at least one example for each of 121 clients"):
        dealt(table, simulation={"clients": 121})
