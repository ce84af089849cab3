"""Rounds, bytes and time to a target."""

from __future__ import annotations

import math

import pytest

from fl_ops.render.rounds import Reached, rounds_to_target
from fl_server.rounds.metrics import BY_LOSS
from protos.fl.v1.admin_pb2 import RoundSummary
from tests.fl_server.criteria import BY_ACCURACY


def rounds(*accuracies: float | None) -> list[RoundSummary]:
    """Rounds of 10 bytes down, 3 up and 0.5 s each; None: not evaluated."""
    metrics = [{} if value is None else {"accuracy": value, "loss": 1 - value} for value in accuracies]
    return [
        RoundSummary(round=number, metrics=each, bytes_down=10, bytes_up=3, seconds=0.5)
        for number, each in enumerate(metrics)
    ]


def test_the_first_round_at_the_target_counts() -> None:
    """0.8 is reached in round 2, the third: 30 bytes down, 9 up, 1.5 s; a worse round 3 changes nothing."""
    assert rounds_to_target(BY_ACCURACY, 0.8, rounds(0.5, None, 0.8, 0.7, 0.9)) == Reached(2, 30, 9, 1.5)


def test_a_loss_reaches_its_target_from_above() -> None:
    """Losses 0.5, 0.25: the second is at most 0.3."""
    assert rounds_to_target(BY_LOSS, 0.3, rounds(0.5, 0.75)) == Reached(1, 20, 6, 1.0)


@pytest.mark.parametrize("accuracies", [(), (None,), (0.79,), (math.nan, math.inf)])
def test_a_target_that_is_not_reached(accuracies: tuple[float | None, ...]) -> None:
    """Without rounds, without an evaluation, below the target, or NaN."""
    assert rounds_to_target(BY_ACCURACY, 0.8, rounds(*accuracies)) is None
