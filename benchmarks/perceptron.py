"""A task whose steps cost little: the demo's scans of digits, and a perceptron with one hidden layer."""

from __future__ import annotations

from torch import nn

from fl_tasks.built_in.digits import Digits


class DigitsPerceptron(Digits):
    """The scans of `digits`, with a perceptron of 2,410 parameters in place of its CNN."""

    version = "1"

    def model(self) -> nn.Module:
        """64 pixels, 32 hidden units, ten digits."""
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
