"""A server step is elementwise: tensor by tensor it has the bits of the step over all of them."""

from __future__ import annotations

import pytest
import torch

import algorithms as fl
from algorithms import tree
from algorithms.registry import names
from fl_server import step as stepping
from tests.fl_server.test_engine import engine, same_snapshot, updates


def some(like, chance):
    """Random tensors of the same names and shapes, none negative: second moments are among them."""
    return {name: torch.rand(tensor.shape, generator=chance) for name, tensor in like.items()}


@pytest.mark.parametrize("name", names())
def test_every_method_steps_tensor_by_tensor(name):
    """Next x, all memories, and the direction: of each tensor alone they are what they are of all together."""
    chance = torch.Generator().manual_seed(2)
    x = {key: torch.randn(size, generator=chance) for key, size in {"a": (7, 33), "b": (5,), "c": ()}.items()}
    algorithm = fl.build(name)
    state = algorithm.init(x)
    state = state.replace(memory={symbol: some(x, chance) for symbol in state.memory})
    cohort = [fl.UpdateInfo("a", 5, 2), fl.UpdateInfo("b", 9, 3)]
    info = fl.RoundInfo(3, 0.1, 0.2, rounds=9, population=4, population_examples=40, cohort_size=2)
    sums = {key: some(x, chance) for each in algorithm.exchanges for key in each.sums(cohort, info)}
    whole, sent = algorithm.server_step(state, sums, info), algorithm.exchanges[-1].direction(state, sums)
    for key, tensor in x.items():
        part = fl.ServerState({key: tensor}, {symbol: {key: each[key]} for symbol, each in state.memory.items()})
        own = {symbol: {key: each[key]} for symbol, each in sums.items()}
        alone = algorithm.server_step(part, own, info)
        assert torch.equal(alone.x[key], whole.x[key])
        assert alone.memory.keys() == whole.memory.keys()
        assert all(torch.equal(each[key], whole.memory[symbol][key]) for symbol, each in alone.memory.items())
        direction = algorithm.exchanges[-1].direction(part, own)
        assert (sent is None) == (direction is None)
        assert sent is None or torch.equal(sent[key], direction[key])


def test_groups_change_no_bit(tmp_path, monkeypatch):
    """Each tensor alone, or all at once: model, momentum, buffers and norms are the same."""
    run = engine(algorithm={"name": "fedcm", "parameters": {"alpha": 0.5}})
    cohort, paths, _ = updates(run, tmp_path)
    start, _ = run.step(run.first(), cohort, paths)
    whole, norms = run.step(start, cohort, paths)
    monkeypatch.setattr(stepping, "GROUP_BYTES", 1)
    alone, others = run.step(start, cohort, paths)
    same_snapshot(alone, whole)
    assert norms == others
    assert norms.aggregate == float(tree.norm(tree.subtract(whole.state.x, start.state.x)))
