"""The demo's task: 1,797 scans of handwritten digits, which scikit-learn includes, so that nothing is downloaded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fl_tasks.base import Classifier, Examples, Shard, TaskError
from fl_tasks.data.examples import checked_fraction, split_shard
from fl_tasks.models import digits_cnn

HELD_OUT_EVERY = 5
"""Every fifth scan of each digit is held out: the same 360 for every run and client."""


class Digits(Classifier):
    """8x8 grey scans of ten digits, [n, 1, 8, 8] in [0, 1]: 1,437 for training, 360 held out.

    client_eval_fraction: share of each shard, in [0, 1), that is held out for evaluation on clients.
    """

    classes = tuple("0123456789")
    held_out = "360 of the 1,797 scans, every fifth of each digit"

    def __init__(self, client_eval_fraction: float = 0.0) -> None:
        self.client_eval_fraction = checked_fraction(client_eval_fraction)
        self._train, self._held_out = _split(*_scans())

    def model(self) -> nn.Module:
        """A CNN of 21,546 parameters."""
        return digits_cnn()

    def train_data(self, shard: Shard) -> Examples:
        """The shard without its held-out part."""
        return split_shard(shard.of(self._train), self.client_eval_fraction)[0]

    def train_labels(self) -> Tensor:
        """Labels of the whole training set, for partitioning."""
        return self._train.targets

    def eval_data(self, shard: Shard | None = None) -> Examples:
        """The 360 held-out scans, or a shard's own held-out part."""
        if shard is None:
            return self._held_out
        return split_shard(shard.of(self._train), self.client_eval_fraction)[1]


def _scans() -> tuple[Tensor, Tensor]:
    """Scans and digits from scikit-learn's file. Importing the library would cost a second and 80 MB."""
    library = find_spec("sklearn")
    if library is None or library.origin is None:
        raise TaskError("the digits task needs scikit-learn: pip install 'impetus-fl[digits]'")
    rows = np.loadtxt(Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz", np.int64, delimiter=",")
    pixels, digits = torch.from_numpy(rows).split([64, 1], dim=1)
    return pixels.reshape(-1, 1, 8, 8).float() / 16, digits.reshape(-1)


def _split(images: Tensor, labels: Tensor) -> tuple[Examples, Examples]:
    by_digit = labels.argsort(stable=True)
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    held_out[by_digit[::HELD_OUT_EVERY]] = True
    everything = Examples(images, labels)
    return everything[~held_out], everything[held_out]
