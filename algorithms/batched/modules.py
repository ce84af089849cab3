"""Dropout of many clients at once, with each client's random numbers.

On a CPU a client draws the numbers that it draws when it trains alone, from a stream of its own: augmentation and
dropout masks are the same. On a GPU a number is a function of the client's seed and of the step, so that a recorded
step draws new ones, and a second pass the same: reproducible, and other ones than those of a client alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from algorithms import tree

State = tuple[Tensor, Tensor | None]
"""The states of torch's default generators on the CPU and on the device."""


class RandomStream:
    """The default generators as one client sees them, seeded at their first use."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device, self._seed = device, seed
        self.state: State | None = None
        """It may be kept and set again, to repeat the numbers. None: nothing was drawn."""

    @contextmanager
    def use(self) -> Iterator[None]:
        """The default generators continue this stream within the context. After it their state is undefined."""
        if self.state is None:
            torch.default_generator.manual_seed(self._seed)
            if self.device.type == "cuda":
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(self._seed)
        else:
            cpu, other = self.state
            torch.default_generator.set_state(cpu)
            if other is not None:
                torch.cuda.set_rng_state(other, self.device)
        try:
            yield
        finally:
            other = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
            self.state = torch.default_generator.get_state(), other


class OwnNumbers:
    """Dropout masks from each client's stream."""

    def __init__(self, streams: Sequence[RandomStream], step: Tensor | None = None) -> None:
        """step: [1], int64, the number of the step on the clients' device."""
        self.streams = streams
        self.step = torch.zeros(1, dtype=torch.int64, device=streams[0].device) if step is None else step

    @property
    def tensors(self) -> list[Tensor]:
        """What a recorded step reads of a group's numbers."""
        return [self.step]

    def copy(self) -> OwnNumbers:
        """The same numbers, with memory of their own."""
        return OwnNumbers(self.streams, self.step.clone())

    def of(self, positions: Sequence[int]) -> OwnNumbers:
        """Those of some of the clients, for one pass."""
        return OwnNumbers([self.streams[position] for position in positions], self.step)

    def of_client(self, position: int) -> AbstractContextManager[None]:
        """Within the context torch's default generators are one client's."""
        return self.streams[position].use()

    def next_step(self) -> None:
        """Called after each step."""
        self.step.add_(1)

    def mark(self) -> list[State | None]:
        """Note the place for `go_back`."""
        return [stream.state for stream in self.streams]

    def go_back(self, mark: Any) -> None:
        """The next pass draws the numbers that followed the mark."""
        for stream, state in zip(self.streams, mark, strict=True):
            stream.state = state

    def masks(self, inputs: Tensor, p: float) -> Tensor:
        """Factors for inputs [clients, ...]: 0 with probability p, else 1 / (1 - p)."""
        masks = []
        for row, stream in zip(inputs, self.streams, strict=True):
            with stream.use():
                # Contiguous, as the inputs of a client alone: the mask is drawn in the order of the memory.
                masks.append(functional.dropout(torch.ones(row.shape, dtype=row.dtype, device=row.device), p))
        return torch.stack(masks)


class CountedNumbers:
    """Dropout masks by counter: each number is a hash of the client's seed, the step, the mask and the entry.

    A second pass of a step draws the same numbers.
    """

    def __init__(self, seeds: Tensor, step: Tensor) -> None:
        """seeds: [clients], int64. step: [1], int64, the number of the step, which its owner raises."""
        self._seeds, self.step, self._drawn = seeds, step, 0

    @classmethod
    def of_seeds(cls, seeds: Sequence[int], device: torch.device, placed: Tensor | None = None) -> CountedNumbers:
        """The numbers of the clients' training seeds, which have 64 bits at most. placed: the same on the device."""
        if placed is None:
            placed = tree.uploaded([*map(signed, seeds)], torch.int64, device)
        return cls(placed, torch.zeros(1, dtype=torch.int64, device=device))

    @property
    def tensors(self) -> list[Tensor]:
        """See `OwnNumbers`."""
        return [self._seeds, self.step]

    def copy(self) -> CountedNumbers:
        """See `OwnNumbers`."""
        return CountedNumbers(self._seeds.clone(), self.step.clone())

    def next_step(self) -> None:
        """See `OwnNumbers`."""
        self.step.add_(1)

    def of(self, positions: Sequence[int]) -> CountedNumbers:
        """See `OwnNumbers`."""
        whole = len(positions) == len(self._seeds)
        return CountedNumbers(self._seeds if whole else tree.rows_of(self._seeds, positions), self.step)

    def of_client(self, position: int) -> AbstractContextManager[None]:
        """See `OwnNumbers`. Nothing is seeded."""
        del position
        return nullcontext()

    def mark(self) -> Tensor:
        """See `OwnNumbers`."""
        return self.step.clone()

    def go_back(self, mark: Any) -> None:
        """See `OwnNumbers`."""
        self.step.copy_(mark)

    def masks(self, inputs: Tensor, p: float) -> Tensor:
        """See `OwnNumbers`."""
        self._drawn += 1
        keys = _mixed(_mixed(self._seeds + self.step * _GOLDEN) + signed(self._drawn * _GOLDEN))
        entries = torch.arange(1, inputs[0].numel() + 1, device=inputs.device)
        uniform = (_mixed(keys[:, None] + entries * _GOLDEN) >> 40 & 0xFFFFFF).to(torch.float32) / (1 << 24)
        return ((uniform >= p).to(inputs.dtype) / ((1.0 - p) or 1.0)).view(inputs.shape)


Numbers = OwnNumbers | CountedNumbers

# SplitMix64 in signed numbers: torch's integers wrap around, and `>>` copies the sign, which the masks take away.
_GOLDEN, _MIX_1, _MIX_2 = (value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def signed(number: int) -> int:
    """The lowest 64 bits as a signed number."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _mixed(values: Tensor) -> Tensor:
    values = (values ^ (values >> 30 & (1 << 34) - 1)) * _MIX_1
    values = (values ^ (values >> 27 & (1 << 37) - 1)) * _MIX_2
    return values ^ (values >> 31 & (1 << 33) - 1)


@contextmanager
def dropout_by_client(modules: Sequence[nn.Dropout], numbers: Numbers) -> Iterator[None]:
    """Within the context these modules draw each client's mask from its numbers, under vmap."""
    for module in modules:
        module.forward = _seeded_forward(module, numbers)  # type: ignore[method-assign]  # of this object, until the end
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _seeded_forward(module: nn.Dropout, numbers: Numbers) -> Any:
    def forward(inputs: Tensor) -> Tensor:
        if not module.training or not module.p:
            return inputs
        dropped: Tensor = _Dropout.apply(inputs, module.p, numbers)  # type: ignore[no-untyped-call]
        return dropped

    return forward


class _Dropout(torch.autograd.Function):
    """Dropout whose batching rule draws one mask for each client."""

    @staticmethod
    def forward(inputs: Tensor, p: float, numbers: Numbers) -> Tensor:
        del inputs, p, numbers
        raise RuntimeError("dropout by client needs a client dimension")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: autograd records the operations of the batching rule."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, inputs: Tensor, p: float, numbers: Numbers) -> tuple[Tensor, int]:  # noqa: PLR0913, PLR0917 - torch defines the parameters
        del info
        inputs = inputs.movedim(in_dims[0], 0)
        return inputs * numbers.masks(inputs.detach(), p), 0
