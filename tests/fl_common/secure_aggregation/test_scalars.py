"""Losses and metrics as whole numbers: their sums are exact, and say means over all clients and nothing else."""

from __future__ import annotations

import pytest

from fl_common.secure_aggregation.scalars import Measured, Summed, count_of, scalars_of, summed_of

METRICS = ("loss", "accuracy")


def summed(*measured: Measured, metrics: tuple[str, ...] = METRICS) -> Summed:
    """The sums of clients, each of which counts as two."""
    rows = [scalars_of(2, one, metrics) for one in measured]
    return summed_of([sum(column) % 2**64 for column in zip(*rows, strict=True)], metrics)


def test_the_means_are_over_examples_and_the_loss_is_over_clients() -> None:
    """The first client has 3 examples, the second one has 1: (3 x 0.5 + 1 x 2.5) / 4 = 1. A loss may be negative."""
    first = Measured(1.5, 3, {"loss": 0.5, "accuracy": 1.0, "other": 9.0})
    second = Measured(-2.0, 1, {"loss": 2.5, "accuracy": 0.0})
    assert summed(first, second) == Summed(4, -0.25, 2, {"loss": 1.0, "accuracy": 0.75})


def test_clients_that_do_not_tell() -> None:
    """One has no loss, one has no held-out examples, and one does not have the metric: they are no part of a mean."""
    told = Measured(1.0, 2, {"loss": 4.0, "accuracy": 0.5})
    others = Measured(None), Measured(None, 5, {"loss": 1.0})
    assert summed(told, *others) == Summed(6, 1.0, 1, {"loss": 4.0, "accuracy": 0.5})
    assert summed(*others) == Summed(4)


@pytest.mark.parametrize("value", [1e300, -1e300])
def test_a_measurement_out_of_range_stays_in_its_number(value: float) -> None:
    """500 of the largest sums stay apart from negative ones."""
    mean = summed(*[Measured(value)] * 500, metrics=()).training_loss
    assert mean == pytest.approx(2.0**36 if value > 0 else -(2.0**36))


def test_another_number_of_sums_is_refused() -> None:
    """The terms have the number."""
    with pytest.raises(ValueError, match="expected 7 sums, got 3"):
        summed_of([1, 0, 0], METRICS)
    assert (count_of(()), count_of(METRICS)) == (3, 7)
