"""Recorded passes: the same results as the strategy that they record, which is the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from algorithms.batched import stacked
from algorithms.batched.captured import SEEN, Captured, FixedPass
from algorithms.batched.modules import RandomStream
from algorithms.batched.strategies import Inputs, Outputs
from algorithms.model_state import trainable_views
from tests.algorithms.batched.test_methods import strategy_of

CPU = torch.device("cpu")
NO_CUDA = "recording needs CUDA"


def model(*, norm: bool = True) -> nn.Module:
    """norm: with buffers that each pass changes."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), *([nn.BatchNorm1d(5)] if norm else []), nn.ReLU(), nn.Linear(5, 3))


def inputs(module: nn.Module, seed: int, clients: int = 3) -> Inputs:
    """A step of clients with their own parameters, buffers and batches."""
    numbers = torch.Generator().manual_seed(seed)
    device = next(module.parameters()).device

    def moved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: each + torch.rand(each.shape, generator=numbers).to(device) if each.is_floating_point() else each
            for name, each in stacked.repeated(tensors, clients).items()
        }

    parameters = {name: each.requires_grad_() for name, each in moved(dict(trainable_views(module))).items()}
    batches = [
        (torch.randn(6, 4, generator=numbers).to(device), torch.randint(3, (6,), generator=numbers).to(device))
        for _ in range(clients)
    ]
    constants = moved({name: each.detach() for name, each in module.named_buffers()})
    return Inputs(parameters, constants, batches, [RandomStream(device) for _ in range(clients)])


def same(one: tuple[Outputs, Inputs], other: tuple[Outputs, Inputs]) -> None:
    """Equal losses, gradients and buffers."""
    (found, after), (expected, after_too) = one, other
    assert torch.equal(found.losses, expected.losses)
    for mine, theirs in ((found.gradients, expected.gradients), (after.constants, after_too.constants)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("norm", [True, False])
def test_a_pass_in_fixed_memory_is_the_strategy(norm: bool) -> None:
    """Three steps of other values, without recording; results of earlier steps stay."""
    module = model(norm=norm)
    module.train()
    strategy = strategy_of("grouped", module, fill=False)
    fixed, kept = FixedPass(strategy, inputs(module, 9)), []
    for seed in range(3):
        one, other = inputs(module, seed), inputs(module, seed)
        kept.append(((fixed.compute(one), one), (strategy.compute(other), other)))
    for pair in kept:
        same(*pair)


def test_a_cpu_records_nothing() -> None:
    """There the strategy computes every pass."""
    module = model()
    module.train()
    strategy = strategy_of("grouped", module, fill=False)
    captured = Captured(strategy)
    for seed in range(SEEN + 2):
        one, other = inputs(module, seed), inputs(module, seed)
        same((captured.compute(one), one), (strategy.compute(other), other))
    assert str(captured) == "passes of 0 shapes are recorded"


@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_CUDA)
def test_recorded_passes_are_those_of_the_strategy() -> None:
    """From the pass on that is recorded; losses, gradients and buffers to the rounding of float32."""
    module = model().to("cuda")
    module.train()
    strategy = strategy_of("grouped", module, fill=False)
    captured = Captured(strategy)
    for seed in range(SEEN + 4):
        one, other = inputs(module, seed), inputs(module, seed)
        found, expected = captured.compute(one), strategy.compute(other)
        torch.testing.assert_close(found.losses, expected.losses)
        for mine, theirs in ((found.gradients, expected.gradients), (one.constants, other.constants)):
            for name, tensor in mine.items():
                torch.testing.assert_close(tensor, theirs[name])
    assert str(captured) == "passes of 1 shapes are recorded"
