"""A server step is elementwise: one tensor at a time gives the same bits as all tensors at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import algorithms as fl
from algorithms import tree
from algorithms.registry import names
from fl_server.aggregation import server_update as module
from tests.fl_server.aggregation.test_engine import engine, same_snapshot, updates


def random_like(like: fl.Tensors, generator: torch.Generator) -> fl.Tensors:
    """Random tensors of the same names and shapes, not negative because some are second moments."""
    return {name: torch.rand(tensor.shape, generator=generator) for name, tensor in like.items()}


@pytest.mark.parametrize("name", names())
def test_every_algorithm_can_update_tensor_by_tensor(name: str) -> None:
    """The next x, all memories and the direction are the same for each tensor alone as for all together."""
    generator = torch.Generator().manual_seed(2)
    x = {key: torch.randn(size, generator=generator) for key, size in {"a": (7, 33), "b": (5,), "c": ()}.items()}
    algorithm = fl.build(name)
    state = algorithm.init(x)
    state = state.replace(memory={symbol: random_like(x, generator) for symbol in state.memory})
    cohort = [fl.UpdateInfo("a", 5, 2), fl.UpdateInfo("b", 9, 3)]
    info = fl.RoundInfo(3, 0.1, 0.2, rounds=9, population=4, population_examples=40, cohort_size=2)
    sums = {key: random_like(x, generator) for each in algorithm.exchanges for key in each.sums(cohort, info)}
    whole, sent = algorithm.server_step(state, sums, info), algorithm.exchanges[-1].direction(state, sums)
    for key, tensor in x.items():
        part = fl.ServerState({key: tensor}, {symbol: {key: each[key]} for symbol, each in state.memory.items()})
        own = {symbol: {key: each[key]} for symbol, each in sums.items()}
        alone = algorithm.server_step(part, own, info)
        assert torch.equal(alone.x[key], whole.x[key])
        assert alone.memory.keys() == whole.memory.keys()
        assert all(torch.equal(each[key], whole.memory[symbol][key]) for symbol, each in alone.memory.items())
        direction = algorithm.exchanges[-1].direction(part, own)
        if sent is None or direction is None:
            assert sent is direction
        else:
            assert torch.equal(sent[key], direction[key])


def test_the_group_size_changes_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, momentum, buffers and norms are the same for each tensor alone as for all at once."""
    run = engine(algorithm={"name": "fedcm", "parameters": {"alpha": 0.5}})
    cohort, paths, _ = updates(run, tmp_path)
    start, _ = run.server_update(run.first(), cohort, paths)
    whole, norms = run.server_update(start, cohort, paths)
    monkeypatch.setattr(module, "GROUP_BYTES", 1)
    alone, others = run.server_update(start, cohort, paths)
    same_snapshot(alone, whole)
    assert norms == others
    assert norms.aggregate == float(tree.norm(tree.subtract(whole.state.x, start.state.x)))


def test_memory_is_released_between_parts_of_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each RELEASE_BYTES of parameters, and never for a model that is smaller."""
    run = engine()
    cohort, paths, _ = updates(run, tmp_path)
    start, released = run.first(), []
    run.release = lambda: released.append("")
    whole, _ = run.server_update(start, cohort, paths)
    assert released == []
    monkeypatch.setattr(module, "GROUP_BYTES", 1)
    monkeypatch.setattr(module, "RELEASE_BYTES", 1)
    parts, _ = run.server_update(start, cohort, paths)
    assert len(released) == len(start.state.x) > 1
    same_snapshot(parts, whole)
