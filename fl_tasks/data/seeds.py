"""Seeds of epochs and examples, and random generators that a data set may use without affecting any other code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Seeds = npt.NDArray[np.uint64]

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def seed_of_epoch(seed: int, epoch: int) -> int:
    """A seed for an epoch, from 0, of a round's `seed`; from 0 to 2^32 - 1, which every library accepts."""
    return int(seeds_of_examples(seed, epoch, np.zeros(1, dtype=np.uint64))[0]) >> 32


def seeds_of_examples(seed: int, epoch: int, positions: npt.NDArray[np.integer]) -> Seeds:
    """A seed of 64 bits for each position in the data, by two rounds of SplitMix64."""
    start = np.uint64(((seed & _MASK) + (epoch + 1) * _GOLDEN) & _MASK)
    with np.errstate(over="ignore"):
        return _mixed(_mixed(np.full(1, start)) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))


def random_order(seed: int, numbers: Tensor) -> Tensor:
    """The places of numbers in a random order, int64 [n]. It depends only on the seed and on the set of numbers."""
    keys = seeds_of_examples(seed, 0, numbers.numpy())
    return torch.from_numpy(np.argsort(keys, kind="stable"))


def _mixed(values: Seeds) -> Seeds:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


def seed_generators(seed: int) -> None:
    """Seed the generators that a data set may use: torch's on the CPU, NumPy's and Python's."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 - the generator that data sets use
    random.seed(seed)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Within the context generators may be seeded; after it they continue as if they had not been."""
    kept = torch.default_generator.get_state(), np.random.get_state(), random.getstate()  # noqa: NPY002 - as above
    try:
        yield
    finally:
        torch.default_generator.set_state(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002 - as above
        random.setstate(kept[2])
