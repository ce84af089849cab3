"""The numbers of a masked update besides its values: what the coordinator learns of training and evaluation as sums.

Each is a whole number; sums count modulo 2^64. A measurement is multiplied with 2^16 and rounded, so sums are exact and
their order changes no bit. In order: the number that gives the weights; whether there is a training loss, and the loss;
and where the clients of a round measure the model that they received: whether this one did, on how many examples, and
for each metric the sum over these examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_FRACTION = 2.0**16
_LARGEST = 2.0**36
"""A larger sum over a client's examples counts as this one: those of 500 clients stay below 2^63."""
_OF_TRAINING = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """What one client measured."""

    loss: float | None = None
    """Mean loss over its steps; None: it is not told."""
    examples: int = 0
    """Held-out examples on which it measured the received model; 0: it did not."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over these examples."""


@dataclass(frozen=True, slots=True)
class Summed:
    """What the sums over a cohort say."""

    counted: int
    """The sum of `Rounding.counted`."""
    training_loss: float | None = None
    """The mean of the clients' losses."""
    evaluated: int = 0
    """Clients that measured the received model."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over all their examples; empty if there are none."""


def count_of(metrics: Sequence[str]) -> int:
    """The number of scalars. metrics: those that clients measure in this round."""
    return _OF_TRAINING + (2 + len(metrics) if metrics else 0)


def scalars_of(counted: int, measured: Measured, metrics: Sequence[str]) -> list[int]:
    """One client's scalars. A client without one of the metrics counts as one that did not measure."""
    scalars = [counted, int(measured.loss is not None), _fixed(measured.loss or 0.0)]
    if not metrics:
        return scalars
    if not measured.examples or any(name not in measured.metrics for name in metrics):
        return scalars + [0] * (2 + len(metrics))
    sums = [_fixed(measured.metrics[name] * measured.examples) for name in metrics]
    return [*scalars, 1, measured.examples, *sums]


def summed_of(sums: Sequence[int], metrics: Sequence[str]) -> Summed:
    """What sums of scalars say. Raises ValueError for another number of them."""
    if len(sums) != count_of(metrics):
        raise ValueError(f"expected {count_of(metrics)} sums, got {len(sums)}")
    counted, losses, loss, *rest = sums
    mean = _number(loss) / losses if losses else None
    if not rest or not rest[0] or not rest[1]:
        return Summed(counted, mean)
    evaluated, examples, *values = rest
    of_all = {name: _number(value) / examples for name, value in zip(metrics, values, strict=True)}
    return Summed(counted, mean, evaluated, of_all)


def _fixed(value: float) -> int:
    """A measurement as a whole number."""
    return round(min(max(value, -_LARGEST), _LARGEST) * _FRACTION)


def _number(total: int) -> float:
    """The measurement of a sum modulo 2^64."""
    return ((total + 2**63) % 2**64 - 2**63) / _FRACTION
