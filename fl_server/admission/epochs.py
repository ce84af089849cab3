"""Metrics that clients measured in each of their local epochs: their check, and their means over clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from fl_tasks.metrics import wrong_name
from fl_tasks.own_loop import MAX_EPOCHS, MAX_METRICS, MAX_VALUE
from protos.fl.v1.training_pb2 import UpdateHeader

Epochs = Sequence[Mapping[str, float]]
"""The metrics of each epoch by name."""


def epochs_of(header: UpdateHeader) -> tuple[dict[str, float], ...]:
    """The metrics in a header."""
    return tuple(dict(epoch.values) for epoch in header.epochs)


def wrong_epochs(header: UpdateHeader) -> str:
    """What is wrong with the metrics in a header; empty if they are valid."""
    if len(header.epochs) > MAX_EPOCHS:
        return f"epochs: expected at most {MAX_EPOCHS}, got {len(header.epochs)}"
    for number, epoch in enumerate(header.epochs):
        if len(epoch.values) > MAX_METRICS:
            return f"epochs[{number}]: expected at most {MAX_METRICS} metrics, got {len(epoch.values)}"
        for name, value in epoch.values.items():
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
