"""Statistics of batch normalisation that are computed anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fl_tasks import Examples, TaskError
from fl_tasks.data.forms import as_data
from fl_tasks.statistics import estimate_statistics
from tests.processes.tiny_task import Tiny

INPUTS = torch.arange(24.0).view(8, 3) ** 1.3


def mean_of(model: nn.Sequential) -> torch.Tensor:
    """The running mean of its first layer."""
    found: torch.Tensor = model.state_dict()["0.running_mean"]
    return found


def a_model() -> nn.Sequential:
    """A normalisation that learns its statistics, and one that a task keeps as it is."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[1].eval()
    return model


def data(count: int = 8) -> Examples:
    """Some examples; labels are not read."""
    return Examples(INPUTS[:count], torch.zeros(count, dtype=torch.int64))


def test_they_are_the_means_over_the_batches() -> None:
    """Mean and unbiased variance of two batches of four, each batch alike; nothing else of the model changes."""
    model = a_model()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    assert estimate_statistics(Tiny(), model, as_data(data()), 4) == 1
    after = model.state_dict()
    batches = INPUTS.split(4)
    torch.testing.assert_close(after["0.running_mean"], torch.stack([each.mean(0) for each in batches]).mean(0))
    torch.testing.assert_close(after["0.running_var"], torch.stack([each.var(0) for each in batches]).mean(0))
    others = before.keys() - {"0.running_mean", "0.running_var"}
    assert all(torch.equal(after[name], before[name]) for name in others)
    assert [each.training for each in model] == [True, False, True]
    assert model[0].momentum == 0.1


def test_the_result_depends_on_the_examples_alone() -> None:
    """Not on the statistics before: a second estimate changes no bit."""
    model = a_model()
    estimate_statistics(Tiny(), model, as_data(data()), 4)
    first = mean_of(model).clone()
    estimate_statistics(Tiny(), model, as_data(data()), 4)
    assert torch.equal(mean_of(model), first)


def test_one_example_has_no_statistics() -> None:
    """A last batch of one is left out, and a single example is refused."""
    model = a_model()
    estimate_statistics(Tiny(), model, as_data(data(5)), 4)
    torch.testing.assert_close(mean_of(model), INPUTS[:4].mean(0))
    with pytest.raises(TaskError, match="two examples or more"):
        estimate_statistics(Tiny(), model, as_data(data(1)), 4)


def test_a_model_without_statistics_is_left_alone() -> None:
    """Its data is not read."""
    assert estimate_statistics(Tiny(), nn.Linear(3, 2), as_data(data()), 4) == 0
