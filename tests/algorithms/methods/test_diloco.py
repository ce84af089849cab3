"""DiLoCo's server half against torch's SGD with Nesterov's momentum on the negative mean delta."""

from __future__ import annotations

import torch

import algorithms as fl
from algorithms.base import RoundInfo


def test_the_outer_step_is_that_of_torch() -> None:
    """Ten rounds of random mean deltas in float64, with the defaults and the gradient -D."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(50, generator=draw, dtype=torch.float64)
    diloco, oracle = fl.build("diloco"), x.clone()
    optimizer = torch.optim.SGD([oracle], lr=0.7, momentum=0.9, nesterov=True)
    state = diloco.init({"x": x})
    for round_ in range(10):
        mean = torch.randn(50, generator=draw, dtype=torch.float64)
        state = diloco.server_step(state, {"Dbar": {"x": mean}}, RoundInfo(round_, 0.01))
        oracle.grad = -mean
        optimizer.step()
    torch.testing.assert_close(state.x["x"], oracle, rtol=1e-12, atol=1e-12)


def test_the_mean_is_uniform() -> None:
    """Clients weigh the same whatever their examples are."""
    weights = fl.build("diloco").weights([fl.UpdateInfo("a", 1, 5), fl.UpdateInfo("b", 99, 5)])
    assert [float(weight) for weight in weights] == [0.5, 0.5]
