"""The rules for one client's update that follow from what the client was assigned and sent: its work, its buffers.

Weights follow from examples, and steps normalise deltas (FedNova, FedCM, SCAFFOLD): a client that could report any
number would choose its own weight.

Buffers arrive as final values and are averaged, or taken at their maximum: the norm of a delta does not cover them. A
floating buffer may move as far as others did, a variance is not negative, and an integer buffer counts work.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

import algorithms as fl
from algorithms import tree
from fl_server.admission.norms import FARTHEST, FLOOR, NO_LIMIT, RelativeNorm
from fl_server.aggregation.updates import Source, read_block
from fl_server.clients.draw_rules import offers_task
from fl_server.run_settings.sections import LocalSection
from fl_server.store.records import ClientRecord
from fl_tasks.batches import count_steps
from fl_tasks.metrics import wrong_name
from fl_tasks.own_loop import MAX_EPOCHS, MAX_METRICS, MAX_VALUE, most_steps
from protos.codec import Entry
from protos.fl.v1.training_pb2 import RefusalReason, UpdateHeader


class UpdateRefused(Exception):
    """The update will never count. `reason` is the wire's, the text says what was expected and what came."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ExpectedWork:
    """The work of one client in one exchange."""

    examples: int
    """Examples that the client registered for the task."""
    local: LocalSection
    trains: bool
    """Whether the exchange trains. Nothing in a full gradient depends on the number of batches."""
    own_batches: int = 0
    """Batches of an epoch that the client registered, where its task makes the batches."""
    own_loop: bool = False
    """Whether the client trains with a loop of the task's own, which makes as many steps as it likes up to a limit."""

    def difference(self, examples: int, came: int) -> str:
        """The contradiction between the work and an update of so many examples and steps; empty if there is none."""
        if examples > self.examples:
            return f"expected {self.examples} examples at most, as the client registered for the task, got {examples}"
        steps = self.steps(examples)
        if self.trains and self.own_loop:
            return "" if came <= steps else f"expected {steps} steps at most, got {came}"
        if self.trains and came != steps:
            return f"expected {steps} steps, as ordered for {examples} examples, got {came}"
        return ""

    def steps(self, examples: int) -> int:
        """K_i, the local steps of a client with this number of examples; with a loop of the task's, the most."""
        epochs = None if self.local.steps else self.local.epochs or 1
        size, steps = self.local.batch_size, self.local.steps
        if self.own_loop:
            return most_steps(examples, size, epochs=epochs, steps=steps)
        return count_steps(examples, size, epochs=epochs, steps=steps, own_batches=self.own_batches)


class RegisteredData(NamedTuple):
    """The training data that a client registered for a task."""

    examples: int = 0
    own_batches: int = 0
    """Batches of an epoch if the client's task makes them; 0 if the run's batch size applies."""


def registered_data(record: ClientRecord | None, task: Mapping[str, str]) -> RegisteredData:
    """The data that a client registered for a task of that name, version and source; none if it has no such task."""
    offers = record.tasks if record is not None else ()
    offered = (
        RegisteredData(int(offer["train_examples"]), int(offer.get("train_batches", 0)))
        for offer in offers
        if offers_task(offer, task)
    )
    return max(offered, default=RegisteredData())


Epochs = Sequence[Mapping[str, float]]
"""The metrics of each epoch by name."""
_MAX_EXAMPLES = 2**53
"""Largest count that float64 represents exactly; weights are computed in it."""


def wrong_work(ordered: ExpectedWork | None, examples: int, steps: int, epochs: Epochs) -> str:
    """What is wrong with what an update says of its client's work; empty if nothing is."""
    if not 1 <= examples <= _MAX_EXAMPLES or steps < 1:
        return f"expected 1 to {_MAX_EXAMPLES} examples and at least one step, got {examples} and {steps}"
    difference = "" if ordered is None else ordered.difference(examples, steps)
    return difference or wrong_epochs(epochs)


def epochs_of(header: UpdateHeader) -> tuple[dict[str, float], ...]:
    """The metrics in a header."""
    return tuple(dict(epoch.values) for epoch in header.epochs)


def wrong_epochs(epochs: Epochs) -> str:
    """What is wrong with an update's metrics; empty if they are valid."""
    if len(epochs) > MAX_EPOCHS:
        return f"epochs: expected at most {MAX_EPOCHS}, got {len(epochs)}"
    for number, values in enumerate(epochs):
        if len(values) > MAX_METRICS:
            return f"epochs[{number}]: expected at most {MAX_METRICS} metrics, got {len(values)}"
        for name, value in values.items():
            if (rule := wrong_name(name)) is not None:
                return f"epochs[{number}]: expected {rule}, got {name[:100]!r}"
            if not abs(value) <= MAX_VALUE:
                return f"epochs[{number}], {name!r}: expected a finite value, got {value}"
    return ""


def mean_epochs(updates: Iterable[tuple[int, Epochs]]) -> tuple[dict[str, float], ...]:
    """Means over the examples of the updates that have a metric, by epoch and name. Their order changes no bit.

    updates: (n_i, the metrics of its epochs).
    """
    rows: list[dict[str, list[tuple[int, float]]]] = []
    for examples, epochs in updates:
        for number, values in enumerate(epochs):
            if number == len(rows):
                rows.append({})
            for name, value in values.items():
                rows[number].setdefault(name, []).append((examples, value))
    return tuple({name: _mean(row[name]) for name in sorted(row)} for row in rows)


def _mean(values: Sequence[tuple[int, float]]) -> float:
    return math.fsum(count * value for count, value in values) / sum(count for count, _ in values)


VARIANCES = frozenset({"running_var", "moving_var", "running_variance", "moving_variance"})
"""Last parts of the names of buffers that are variances: torch's norm layers have the first."""
_PASSES = 4
"""Times that local training may see an example per step: at two points, and before the steps."""
_BLOCK = 1 << 16
"""Values in memory at a time."""


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

    @cached_property
    def _constant(self) -> frozenset[str]:
        """Names of the floating buffers that were sent with values that are not finite."""
        floating = {name: tensor for name, tensor in self.sent.items() if tensor.is_floating_point() and tensor.numel()}
        if not floating:
            return frozenset()
        finite = torch.stack([torch.isfinite(tensor).all() for tensor in floating.values()]).tolist()
        return frozenset(name for name, ok in zip(floating, finite, strict=True) if not ok)

    def _check_distance(self, distance: float, before: float) -> None:
        farthest, limit = FARTHEST * (1.0 + before), self.limit.limit_with(FLOOR * before)
        if self.bounded and not distance <= farthest:
            why = f"{FARTHEST:g} times 1 + the norm of those sent"
            raise UpdateRefused(
                RefusalReason.REFUSAL_REASON_NORM,
                f"expected buffers at a distance of {farthest:g} at most ({why}), got {distance:g}",
            )
        if self.bounded and limit and distance > limit:
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
