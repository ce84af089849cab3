"""The rules for the buffers of an update: how far they may be from those that were sent.

Buffers arrive as final values and are averaged, or taken at their maximum: the norm of a delta does not cover them. A
floating buffer may move as far as others did, a variance is not negative, and an integer buffer counts work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

import algorithms as fl
from algorithms import tree
from algorithms.aggregate import squares_of_rows
from fl_server.admission.client_rules import UpdateRefused
from fl_server.admission.norms import FARTHEST, FLOOR, NO_LIMIT, RelativeNorm
from fl_server.aggregation.updates import FILES, Source, read_block
from protos.codec import Entry
from protos.fl.v1.training_pb2 import RefusalReason

VARIANCES = frozenset({"running_var", "moving_var", "running_variance", "moving_variance"})
"""Last parts of the names of buffers that are variances: torch's norm layers have the first."""
_PASSES = 4
"""Times that local training may see an example per step: at two points, and before the steps."""
_BLOCK = 1 << 16
"""Values of one update in memory at a time."""
_PLAIN = 1e150
"""Larger values may overflow a sum of squares."""
_EXACT = 1 << 52
"""Larger integers are compared one by one: their differences may have no float64."""


class BufferFacts(NamedTuple):
    """What has to be known of the buffers of one of several updates."""

    plain: float
    """1 if all floating values are finite and of usual size, and no variance is negative; else the update is to be
    checked alone. A buffer that was sent with other values must have the same bits."""
    growth: float
    """The largest growth of an integer; infinite if one fell below what was sent or 0, or is to be checked alone."""
    squares: float
    """The square of the distance of the floating buffers from those sent."""
    before: float
    """The sum of the squares of those sent."""


@dataclass(frozen=True)
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
        """The L2 distance of the floating buffers from those sent; None without any. Raises UpdateRefused.

        A buffer that was sent with values that are not finite, as masks of minus infinity are, must have the same bits.

        Args:
            update: a whole update.
            entries: of its delta, with offsets in the update.
            odd: names of the buffers with values that are not finite, or too large for a sum of squares.
        """
        if all(entry.trainable for entry in entries):
            return None
        squares, before, floating, constant = 0.0, 0.0, False, self._constant
        for entry, start, values in _blocks(update, entries):
            sent = self._sent(entry, start, values)
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

    def _sent(self, entry: Entry, start: int, values: torch.Tensor) -> torch.Tensor | None:
        sent = self.sent.get(entry.name)
        return None if sent is None else sent.flatten()[start : start + len(values)].to(values.device)

    def usual(self, facts: BufferFacts) -> tuple[bool, float]:
        """Whether no rule speaks against the buffers of an update; and their distance, as `check` returns it."""
        distance = math.sqrt(facts.squares)
        near = distance <= min(self._limits(math.sqrt(facts.before)))
        return bool(facts.plain) and (not self.bounded or (near and facts.growth <= self.most)), distance

    def _limits(self, before: float) -> tuple[float, float]:
        """The farthest distance, and the one relative to earlier updates. before: the norm of the buffers sent."""
        return FARTHEST * (1.0 + before), self.limit.limit_with(FLOOR * before) or math.inf

    @cached_property
    def _constant(self) -> frozenset[str]:
        """Names of the floating buffers that were sent with values that are not finite."""
        floating = {name: tensor for name, tensor in self.sent.items() if tensor.is_floating_point() and tensor.numel()}
        if not floating:
            return frozenset()
        finite = torch.stack([torch.isfinite(tensor).all() for tensor in floating.values()]).tolist()
        return frozenset(name for name, ok in zip(floating, finite, strict=True) if not ok)

    def _check_distance(self, distance: float, before: float) -> None:
        farthest, limit = self._limits(before)
        if self.bounded and not distance <= farthest:
            why = f"{FARTHEST:g} times 1 + the norm of those sent"
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_NORM,
                f"expected buffers at a distance of {farthest:g} at most ({why}), got {distance:g}",
            )
        if self.bounded and distance > limit:
            why = f"{self.limit.times:g} times the largest median of a round, round.max_relative_payload"
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_RELATIVE_NORM,
                f"expected buffers at a distance of {limit:g} at most ({why}), got {distance:g}",
            )

    def _check_integers(self, entry: Entry, values: torch.Tensor, sent: torch.Tensor) -> None:
        """Between the value sent (or 0 if that is smaller) and the value sent plus the largest growth."""
        wide, before = values.to(torch.int64), sent.to(torch.int64)
        low, high = before.clamp(max=0), before.clamp(max=torch.iinfo(torch.int64).max - self.most) + self.most
        if bool((wide < low).any()) or bool((wide > high).any()):
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_NORM,
                f"buffer {entry.name!r}: expected whole numbers of {int(high.max())} at most ({self.most} over those "
                f"sent) and {int(low.min())} at least, got {int(wide.max())} and {int(wide.min())}",
            )


def most_counted(steps: int, examples: int, batch_size: int) -> int:
    """Largest growth of a buffer that counts examples, batches or steps, in this number of steps."""
    return _PASSES * (steps * batch_size + examples + batch_size)


def _check_variance(entry: Entry, values: torch.Tensor) -> None:
    if entry.name.rpartition(".")[2] in VARIANCES and bool((values < 0).any()):
        raise UpdateRefused(
            RefusalReason.REFUSAL_REASON_NORM,
            f"buffer {entry.name!r}: expected a variance of 0 or more, got {float(values.min()):g}",
        )


def _check_unchanged(entry: Entry, values: torch.Tensor, sent: torch.Tensor | None, constant: Collection[str]) -> None:
    """Raises UpdateRefused unless a buffer with values that are not finite has the bits that were sent."""
    if entry.name not in constant:
        raise UpdateRefused(
            RefusalReason.REFUSAL_REASON_NOT_FINITE,
            f"delta, tensor {entry.name!r}: expected finite values, got a NaN or an infinity",
        )
    if sent is None or not tree.same_bits(sent, values):
        raise UpdateRefused(
            RefusalReason.REFUSAL_REASON_NOT_FINITE,
            f"delta, buffer {entry.name!r}: expected the values that were sent, because some of them are not finite,"
            " got others: a buffer that changes in training must be finite",
        )


def _blocks(update: Source, entries: Sequence[Entry]) -> Iterator[tuple[Entry, int, torch.Tensor]]:
    """(entry, number of the first value, values) of the buffers, in pieces."""
    for entry in entries:
        for start in range(0, 0 if entry.trainable else entry.numel, _BLOCK):
            count = min(_BLOCK, entry.numel - start)
            yield entry, start, read_block(update, entry, start, count)


def buffer_facts(updates: Sequence[Source], entries: Sequence[Entry], sent: fl.Tensors) -> list[BufferFacts] | None:
    """The facts of each update, which are read from their device at once. None: they are not held together.

    entries: of the delta, with offsets in the update. sent: as in BufferRules.
    """
    rows: list[torch.Tensor] | None = None
    for entry in entries:
        for start in range(0, 0 if entry.trainable else entry.numel, _BLOCK):
            count = min(_BLOCK, entry.numel - start)
            first = updates[0]
            values = None if isinstance(first, FILES) else first.read_with(updates, entry, start, count)
            if values is None:
                return None
            facts = _facts(entry, values, start, sent.get(entry.name))
            if rows is None:
                rows = facts
            else:
                plain, growth, squares, before = zip(rows, facts, strict=True)
                rows = [torch.minimum(*plain), torch.maximum(*growth), torch.add(*squares), torch.add(*before)]
    return None if rows is None else [BufferFacts(*row) for row in torch.stack(rows, dim=1).tolist()]


def _facts(entry: Entry, values: torch.Tensor, start: int, sent: torch.Tensor | None) -> list[torch.Tensor]:
    """The facts of a block of each update, [updates, values], as columns in float64."""
    zeros = torch.zeros(len(values), dtype=torch.float64, device=values.device)
    plain, growth, squares, before = zeros + 1, zeros, zeros, zeros
    if sent is None and not values.is_floating_point():
        return [plain, growth, squares, before]
    part = values if sent is None else sent.flatten()[start : start + values.shape[1]].to(values.device)
    if values.is_floating_point():
        wide = values.double()
        plain = (wide.abs() <= _PLAIN).all(dim=1).double()
        if entry.name.rpartition(".")[2] in VARIANCES:
            plain = plain * (values >= 0).all(dim=1)
        if sent is not None:
            finite, same = torch.isfinite(sent).all().to(values.device), tree.bits(values) == tree.bits(part)
            plain = torch.where(finite, plain, same.all(dim=1).double())
            squares = torch.where(finite, squares_of_rows(wide - part.double()), zeros)
            before = torch.where(finite, torch.sum(part.double() ** 2), zeros)
    elif values.dtype != torch.bool:
        wide, low = values.to(torch.int64), part.to(torch.int64)
        small = (wide.abs() <= _EXACT) & (low.abs() <= _EXACT) & (wide >= low.clamp(max=0))
        growth = torch.where(small.all(dim=1), (wide - low).amax(dim=1).double(), math.inf)
    return [plain, growth, squares, before]
