"""Checks the buffers of an update against those that its client was sent.

Buffers arrive as final values and are averaged, or taken at their maximum: the norm of a delta does not cover them. A
floating buffer may move as far as others did, a variance is not negative, and an integer buffer counts work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

import algorithms as fl
from algorithms import tree
from fl_server.admission.norms import FARTHEST, FLOOR, NO_LIMIT, RelativeNorm
from fl_server.aggregation.updates import Source, read_block
from protos.codec import Entry

VARIANCES = frozenset({"running_var", "moving_var", "running_variance", "moving_variance"})
"""Last parts of the names of buffers that are variances: torch's norm layers have the first."""
_PASSES = 4
"""Times that local training may see an example per step: at two points, and before the steps."""
_BLOCK = 1 << 16
"""Values in memory at a time."""


class BadBuffer(Exception):
    """A buffer that the run does not accept. The text names it, with expected and received values."""

    def __init__(self, detail: str, *, relative: bool = False) -> None:
        super().__init__(detail)
        self.relative = relative
        """Whether only the buffers of other clients speak against it; else, no honest training produces it."""


class NotFiniteBuffer(BadBuffer):
    """A buffer with a NaN or an infinity that its client did not get, or one that it got and changed."""


@dataclass(frozen=True, slots=True)
class BufferRules:
    """The rules for the buffers of one client's update. The default only checks variances."""

    sent: fl.Tensors = field(default_factory=dict)
    """The buffers that the client was sent, by name."""
    bounded: bool = False
    """Whether distances and integers are checked."""
    limit: RelativeNorm = NO_LIMIT
    """Limit of the distance."""
    most: int = 0
    """Largest growth of an integer: the number of examples seen in the local steps."""

    def check(self, update: Source, entries: Sequence[Entry], odd: Collection[str] = ()) -> float | None:
        """The L2 distance of the floating buffers from those sent; None without any. Raises BadBuffer.

        A buffer that was sent with values that are not finite, as masks of minus infinity are, must have the same bits.

        Args:
            update: a whole update.
            entries: of its delta, with offsets in the update.
            odd: names of the buffers with values that are not finite, or too large for a sum of squares.
        """
        if all(entry.trainable for entry in entries):
            return None
        squares, before, floating, constant = 0.0, 0.0, False, _constant(self.sent)
        for entry, start, values in _blocks(update, entries):
            sent = self._sent(entry, start, len(values))
            if entry.name in constant or entry.name in odd:
                _check_unchanged(entry, values, sent, constant)
                floating = True
                continue
            _check_variance(entry, values)
            if sent is None:
                continue
            if values.is_floating_point():
                floating, wide = True, sent.double()
                squares += float(torch.sum((values.double() - wide) ** 2))
                before += float(torch.sum(wide**2))
            elif self.bounded and values.dtype != torch.bool:
                self._check_integers(entry, values, sent)
        if not floating:
            return None
        self._check_distance(math.sqrt(squares), math.sqrt(before))
        return math.sqrt(squares)

    def _sent(self, entry: Entry, start: int, count: int) -> torch.Tensor | None:
        values = self.sent.get(entry.name)
        return None if values is None else values.flatten()[start : start + count]

    def _check_distance(self, distance: float, before: float) -> None:
        farthest, limit = FARTHEST * (1.0 + before), self.limit.limit_with(FLOOR * before)
        if self.bounded and not distance <= farthest:
            why = f"{FARTHEST:g} times 1 + the norm of those sent"
            raise BadBuffer(f"expected buffers at a distance of {farthest:g} at most ({why}), got {distance:g}")
        if self.bounded and limit and distance > limit:
            why = f"{self.limit.times:g} times the largest median of a round, round.max_relative_payload"
            raise BadBuffer(
                f"expected buffers at a distance of {limit:g} at most ({why}), got {distance:g}", relative=True
            )

    def _check_integers(self, entry: Entry, values: torch.Tensor, sent: torch.Tensor) -> None:
        """Between the value sent (or 0 if that is smaller) and the value sent plus the largest growth."""
        wide, before = values.to(torch.int64), sent.to(torch.int64)
        low, high = before.clamp(max=0), before.clamp(max=torch.iinfo(torch.int64).max - self.most) + self.most
        if bool((wide < low).any()) or bool((wide > high).any()):
            raise BadBuffer(
                f"buffer {entry.name!r}: expected whole numbers of {int(high.max())} at most ({self.most} over those "
                f"sent) and {int(low.min())} at least, got {int(wide.max())} and {int(wide.min())}"
            )


def most_counted(steps: int, examples: int, batch_size: int) -> int:
    """Largest growth of a buffer that counts examples, batches or steps, in this number of steps."""
    return _PASSES * (steps * batch_size + examples + batch_size)


def _check_variance(entry: Entry, values: torch.Tensor) -> None:
    if entry.name.rpartition(".")[2] in VARIANCES and bool((values < 0).any()):
        raise BadBuffer(f"buffer {entry.name!r}: expected a variance of 0 or more, got {float(values.min()):g}")


def _constant(sent: fl.Tensors) -> frozenset[str]:
    """Names of the floating buffers with values that are not finite."""
    floating = [name for name, tensor in sent.items() if tensor.is_floating_point() and tensor.numel()]
    return frozenset(name for name in floating if not bool(torch.isfinite(sent[name]).all()))


def _check_unchanged(entry: Entry, values: torch.Tensor, sent: torch.Tensor | None, constant: Collection[str]) -> None:
    """Raises NotFiniteBuffer unless a buffer with values that are not finite has the bits that were sent."""
    if entry.name not in constant:
        raise NotFiniteBuffer(f"tensor {entry.name!r}: expected finite values, got a NaN or an infinity")
    if sent is None or not tree.same_bits(sent, values):
        raise NotFiniteBuffer(
            f"buffer {entry.name!r}: expected the values that were sent, because some of them are not finite, got"
            " others: a buffer that changes in training must be finite"
        )


def _blocks(update: Source, entries: Sequence[Entry]) -> Iterator[tuple[Entry, int, torch.Tensor]]:
    """(entry, number of the first value, values) of the buffers, in pieces on the CPU."""
    for entry in entries:
        for start in range(0, 0 if entry.trainable else entry.numel, _BLOCK):
            count = min(_BLOCK, entry.numel - start)
            yield entry, start, read_block(update, entry, start, count).cpu()
