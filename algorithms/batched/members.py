"""The clients of a group: what they have in common, and what each has of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from algorithms.batched.batches import Drawn, Planned, check_work
from algorithms.batched.contexts import Contexts
from algorithms.batched.modules import Numbers, OwnNumbers, RandomStream
from algorithms.client import LocalData, Work


@dataclass(frozen=True, slots=True)
class Members:
    """The clients of a group, sorted by their number of steps, the most first."""

    work: Work
    """The work of the first one. Algorithm, exchange and settings are those of all."""
    contexts: Contexts
    batches: Drawn | Planned
    steps: Sequence[int]
    """K_i."""
    epoch_steps: Sequence[int]
    """The steps of each epoch, as LocalData has them."""
    numbers: Numbers
    """Random numbers of the model's passes."""
    rates: Tensor | None = None
    """The learning rates on the device, as `rates_of_all`. None: they are uploaded where a step reads them."""

    @classmethod
    def drawn(cls, data: Sequence[LocalData], works: Sequence[Work], streams: Sequence[RandomStream]) -> Members:
        """Clients whose batches come from their own iterators, in the order of their steps.

        Raises NotBatched and ValueError as `check_work`.
        """
        for one, work in zip(data, works, strict=True):
            check_work(one, work)
        return cls(
            works[0],
            Contexts.of_clients([work.context for work in works]),
            Drawn(data, streams),
            [one.steps for one in data],
            [one.epoch_steps for one in data],
            OwnNumbers(streams),
        )
