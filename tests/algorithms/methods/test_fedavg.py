"""FedAvg in numbers worked by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import algorithms as fl
from algorithms.conformance.federation import Federation


def test_weights_by_examples_by_hand() -> None:
    """x = 1; deltas 2 and -1 from 1 and 3 examples, eta_g = 2.

    Dbar = (1 * 2 + 3 * -1) / 4 = -0.25, so x = 1 + 2 * -0.25 = 0.5.
    """
    fedavg = fl.build("fedavg", eta_g=2)
    updates = [
        (fl.UpdateInfo("a", num_examples=1, num_steps=9), {"w": torch.tensor([2.0])}),
        (fl.UpdateInfo("b", num_examples=3, num_steps=1), {"w": torch.tensor([-1.0])}),
    ]
    state = fl.apply_updates(fedavg, fedavg.init({"w": torch.tensor([1.0])}), updates, fl.RoundInfo(0, 0.1))
    assert state.x["w"].item() == 0.5


def test_one_full_step_each_is_gradient_descent(federation: Federation) -> None:
    """K = 1, full batch, all clients: x_{t+1} = x_t - eta_l * sum p_i grad f_i(x_t), here with p = 2/9, 4/9, 3/9."""
    federation = dataclasses.replace(federation.with_steps(1))
    y = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for state in federation.play(fl.build("fedavg"), 4):
        y = y - 0.1 * sum(n / 9 * client.gradient(y) for n, client in zip((2, 4, 3), federation.clients, strict=True))
        assert torch.cat([state.x["head"], state.x["tail"].flatten()]) == pytest.approx(y, rel=1e-12)


def test_only_the_model_is_sent(federation: Federation) -> None:
    """FedAvg has no direction and no memory: a client is sent M once."""
    fedavg = fl.build("fedavg")
    state = fedavg.init(federation.x)
    assert fedavg.direction(state) is None
    assert not state.memory
