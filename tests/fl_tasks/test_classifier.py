"""The convenience class of classifiers."""

from __future__ import annotations

import math

import torch

from fl_tasks import Classifier


def test_loss_and_metrics_by_hand() -> None:
    """Scores 0 and ln 3 are probabilities 1/4 and 3/4: class 1 costs ln(4/3), class 0 costs ln 4."""
    output = torch.tensor([[0.0, math.log(3)]]).repeat(2, 1)
    target = torch.tensor([1, 0])
    expected = torch.tensor([math.log(4 / 3), math.log(4)])
    values = Classifier().metrics(output, target)
    torch.testing.assert_close(values["loss"], expected)
    assert values["accuracy"].tolist() == [1.0, 0.0]
    torch.testing.assert_close(Classifier().loss(output, target), expected.mean())


def test_further_axes_are_averaged_within_each_example() -> None:
    """With scores [2, classes, 3] there is still one value for each of the 2 examples; 2 of 3 right is 0.667."""
    output = torch.zeros(2, 4, 3)
    output[:, 0] = 1
    target = torch.tensor([[0, 0, 1], [0, 0, 0]])
    values = Classifier().metrics(output, target)
    torch.testing.assert_close(values["accuracy"], torch.tensor([2 / 3, 1.0]))
    assert values["loss"].shape == (2,)
