"""The held-out part of a shard, for evaluation."""

from __future__ import annotations

import pytest
import torch

from fl_tasks import Examples, TaskError
from fl_tasks.data.examples import split_shard

TEN = Examples(torch.arange(10), torch.arange(10), torch.neg)


@pytest.mark.parametrize(("fraction", "held_out"), [(0.0, []), (0.2, [0, 5]), (0.35, [0, 3, 6]), (0.04, [])])
def test_parts_are_disjoint_and_whole(fraction: float, held_out: list[int]) -> None:
    """floor(fraction * 10) examples, evenly spread, are held out; the rest is trained on."""
    train, evaluation = split_shard(TEN, fraction)
    assert held_out == evaluation.inputs.tolist()
    assert [i for i in range(10) if i not in held_out] == train.targets.tolist()


def test_evaluation_is_not_augmented() -> None:
    """Only the training part keeps the augmentation."""
    train, evaluation = split_shard(TEN, 0.5)
    assert (torch.neg, None) == (train.augment, evaluation.augment)


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_a_fraction_leaves_something_to_train_on(fraction: float) -> None:
    """A fraction of one or more, or below zero, is refused."""
    with pytest.raises(TaskError, match="from 0 to below 1"):
        split_shard(TEN, fraction)
