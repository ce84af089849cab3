"""Processes that compute each batch together have the steps of one process, up to rounding."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import algorithms as fl
from algorithms.client import LocalData, Work, answer


class Threads:
    """Three processes, here threads, which add up at a barrier."""

    def __init__(self, rank: int, barrier: threading.Barrier, given: dict[int, list[Tensor]]) -> None:
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._given = barrier, given

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """See Processes."""
        self._given[self.rank] = [tensor.clone() for tensor in tensors]
        self._barrier.wait()
        for number, tensor in enumerate(tensors):
            tensor.copy_(sum((self._given[rank][number] for rank in range(self.size)), torch.zeros(())))
        self._barrier.wait()


def trained(method: str, settings: fl.LocalSettings, processes: Threads | None) -> fl.ClientUpdate:
    """The update of three batches, the last one of two examples, so that a third process has no part of it."""
    torch.manual_seed(0)
    model = copy.deepcopy(MODEL)
    draw = torch.Generator().manual_seed(1)
    batches = [(torch.randn(size, 4, generator=draw), torch.randint(3, (size,), generator=draw)) for size in (7, 6, 2)]
    algorithm = fl.build(method)
    direction = {name: torch.full_like(tensor, 0.01) for name, tensor in model.named_parameters()}
    state = algorithm.client_init(dict(model.named_parameters()))
    data = LocalData(batches, batches, functional.cross_entropy, processes=processes)
    exchange = len(algorithm.exchanges) - 1
    return answer(model, data, Work(algorithm, fl.ClientContext(direction, state), settings, exchange))


MODEL = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@pytest.mark.parametrize("method", ["fedavg", "fedcm", "fedsam", "mime", "scaffold"])
@pytest.mark.parametrize("more", [{}, {"max_gradient_norm": 0.3, "micro_batch_size": 2, "weight_decay": 0.1}])
def test_three_processes_have_the_steps_of_one(method: str, more: dict[str, Any]) -> None:
    """Each has the same update at the end: payloads and the mean loss."""
    settings, barrier, given = fl.LocalSettings(0.1, **more), threading.Barrier(3, timeout=60), dict[int, Any]()
    alone, updates = trained(method, settings, None), dict[int, fl.ClientUpdate]()

    def run(rank: int) -> None:
        updates[rank] = trained(method, settings, Threads(rank, barrier, given))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(updates) == [0, 1, 2]
    for update in updates.values():
        assert update.loss == pytest.approx(alone.loss, rel=1e-5)
        for payload, tensors in alone.payloads.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(update.payloads[payload][name], tensor, rtol=1e-4, atol=1e-6)


def test_an_ascent_of_the_inputs_is_refused() -> None:
    """FedRobust ascends the inputs of the whole batch."""
    with pytest.raises(fl.AlgorithmError, match="expected processes = 1"):
        trained("fedrobust", fl.LocalSettings(0.1), Threads(0, threading.Barrier(1), {}))
