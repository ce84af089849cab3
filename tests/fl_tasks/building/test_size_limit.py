"""A model that is too large is refused before its memory is taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fl_tasks.building.size_limit import ModelTooLarge, SizeLimit

MIB = 1 << 20


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: nn.Linear(1 << 20, 1 << 20), id="one-tensor"),
        pytest.param(lambda: [nn.Linear(100, 100) for _ in range(10**6)], id="many-tensors"),
        pytest.param(lambda: [nn.Linear(1, 1) for _ in range(10**6)], id="many-small-ones"),
    ],
)
def test_a_model_over_the_limit_is_not_made(make: Callable[[], object]) -> None:
    """A tensor of 4 TiB is never asked for; of many tensors those are made that fit."""
    with pytest.raises(ModelTooLarge, match=r"\d+ bytes"), SizeLimit(8 * MIB):
        make()


def test_memory_that_is_freed_while_a_model_is_made_does_not_count() -> None:
    """Temporary tensors of 40 MiB in all, one after the other, and views pass a limit of 8 MiB."""
    with SizeLimit(8 * MIB):
        kept = nn.Linear(1000, 1000)
        for _ in range(10):
            kept.weight.data.copy_(torch.randn(1000, 1000).view(-1).view(1000, 1000))
    assert kept.weight.any()


def test_a_model_within_the_limit_has_the_same_bits() -> None:
    """The limit changes neither the values nor the random numbers that follow."""
    found = []
    for limit in (None, SizeLimit(8 * MIB)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            if limit is None:
                model = nn.LSTM(20, 30, 2)
            else:
                with limit:
                    model = nn.LSTM(20, 30, 2)
            found.append([*model.state_dict().values(), torch.rand(3)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
