"""Data sets for tests; worker processes import them from here."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset


class Drawn(Dataset[dict[str, Tensor]]):
    """An example is its number and a number from each generator that a data set may use."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = [float(torch.rand(())), random.random(), np.random.random()]  # noqa: NPY002 - as data sets do
        return {"index": torch.tensor(index), "drawn": torch.tensor(drawn, dtype=torch.float64)}


class InProcess(Drawn):
    """An example is its number and the process that read it."""

    def __getitem__(self, index: int) -> Any:
        return {"index": torch.tensor(index), "process": torch.tensor(os.getpid())}


class Together(Drawn):
    """Reads a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Tensor]]:
        noise = float(torch.rand(()))
        return [{"index": torch.tensor(index), "noise": torch.tensor(noise)} for index in indices]


class Broken(Drawn):
    """Example 7 cannot be read, for lack of memory or for another reason."""

    def __init__(self, error: type[Exception] = KeyError) -> None:
        self._error = error

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 7:
            raise self._error("no file")
        return super().__getitem__(index)


class Dying(Drawn):
    """A worker that reads example 7 ends."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 7:
            os._exit(3)
        return super().__getitem__(index)


def only_two(examples: list[Any]) -> Any:
    """A collate function that fails on batches of another size."""
    first, second = examples
    return first, second
