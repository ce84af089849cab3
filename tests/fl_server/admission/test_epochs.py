"""Metrics of local epochs in an update's header: their check, and their means over clients."""

from __future__ import annotations

import math

import pytest

from fl_server.admission.client_rules import epochs_of, mean_epochs, wrong_epochs
from protos.fl.v1.training_pb2 import EpochMetrics, UpdateHeader


def header(*epochs: dict[str, float]) -> UpdateHeader:
    """A header with these metrics."""
    return UpdateHeader(epochs=[EpochMetrics(values=values) for values in epochs])


def test_valid_metrics_are_read() -> None:
    """They come in the order of the epochs."""
    given = header({"loss": 2.0}, {"loss": 1.0, "accuracy": 0.5})
    assert wrong_epochs(epochs_of(given)) == ""
    assert epochs_of(given) == ({"loss": 2.0}, {"loss": 1.0, "accuracy": 0.5})


@pytest.mark.parametrize(
    ("epochs", "why"),
    [
        pytest.param([{"loss": math.nan}], "expected a finite value, got nan", id="nan"),
        pytest.param([{}, {"loss": math.inf}], "epochs[1], 'loss'", id="infinite"),
        pytest.param([{}] * 101, "expected at most 100, got 101", id="epochs"),
        pytest.param([{f"m{number}": 0.0 for number in range(17)}], "at most 16 metrics, got 17", id="metrics"),
        pytest.param([{"": 0.0}], "names of 1 to 64", id="no-name"),
        pytest.param([{"x" * 65: 0.0}], "names of 1 to 64", id="long-name"),
        pytest.param([{"a\0": 0.0}], "printable", id="control-character"),
    ],
)
def test_wrong_metrics_are_named(epochs: list[dict[str, float]], why: str) -> None:
    """The text has the place, what was expected and what came."""
    assert why in wrong_epochs(epochs_of(header(*epochs)))


def test_means_are_weighted_by_examples() -> None:
    """(1 * 4 + 3 * 2) / 4 = 2.5. A client without an epoch or a metric is not in its mean; the order has no effect."""
    updates = [(1, [{"loss": 4.0}, {"loss": 1.0}]), (3, [{"loss": 2.0, "accuracy": 0.5}])]
    expected = ({"loss": 2.5, "accuracy": 0.5}, {"loss": 1.0})
    assert mean_epochs(updates) == expected
    assert mean_epochs(reversed(updates)) == expected
    assert mean_epochs([]) == ()
