"""Updates of a closed exchange that are too long relative to the others, or make the sum overflow."""

from __future__ import annotations

import pytest

from fl_server.admission.norms import Measured, NormHistory, outliers, overflow_culprit
from fl_server.run_settings.sections import RoundSection

SECTION = RoundSection()


def measured(*lengths: float, vector: str = "delta") -> list[Measured]:
    """Updates with these norms."""
    return [Measured(f"c{at}", {vector: length}) for at, length in enumerate(lengths)]


def test_an_outlier_needs_three_updates() -> None:
    """More than 100 times the lower median of the round. None of two updates, and none if the median is 0."""
    assert [client for client, _ in outliers(SECTION, NormHistory(), measured(1.0, 2.0, 201.0))] == ["c2"]
    assert outliers(SECTION, NormHistory(), measured(1.0, 2.0, 200.0)) == ()
    assert outliers(SECTION, NormHistory(), measured(1.0, 1e30)) == ()
    assert outliers(SECTION, NormHistory(), measured(0.0, 0.0, 1.0)) == ()


def test_an_update_within_the_model_s_norm_is_no_outlier() -> None:
    """In a run that starts at an optimum of the other clients, a client with new data has long updates."""
    updates = measured(1e-9, 1e-9, 0.5)
    assert outliers(SECTION, NormHistory(), updates, model_norm=0.5) == ()
    assert [client for client, _ in outliers(SECTION, NormHistory(), updates, model_norm=0.4)] == ["c2"]


@pytest.mark.parametrize(
    "section",
    [
        RoundSection(max_relative_norm=0),
        RoundSection(over_relative_norm="clip"),
        RoundSection(clients_per_round=3, quorum=3, reducer="median"),
    ],
)
def test_no_outlier_where_the_limit_does_not_apply(section: RoundSection) -> None:
    """The limit is off, longer updates are clipped, or a robust reducer handles them."""
    assert outliers(section, NormHistory(), measured(1.0, 1.0, 1e9)) == ()


def test_a_clipped_delta_is_measured_after_clipping() -> None:
    """A delta that the gate scaled down is no outlier. Other payloads are not scaled."""
    short = [*measured(1.0, 1.0), Measured("long", {"delta": 1e9}, 1e-9)]
    assert outliers(SECTION, NormHistory(), short) == ()
    gradient = [*measured(1.0, 1.0, vector="full_gradient"), Measured("long", {"full_gradient": 1e9}, 1e-9)]
    assert [client for client, _ in outliers(SECTION, NormHistory(), gradient)] == ["long"]


def test_no_outlier_where_committed_rounds_give_a_limit() -> None:
    """The gate has already applied that limit."""
    history = NormHistory()
    for _ in range(3):
        history = history.after([{"delta": 1.0}])
    assert outliers(SECTION, history, measured(1.0, 1.0, 1e9)) == ()


def test_an_overflow_is_attributed_to_the_longest_update() -> None:
    """One at a time, if it is far longer than the others. A single update only if no training gives such a norm."""
    assert [client for client, _ in overflow_culprit(measured(1.0, 3e38))] == ["c1"]
    assert [client for client, _ in overflow_culprit(measured(1.0, 1.0, 1e20, 1e30))] == ["c3"]
    assert overflow_culprit(measured(1e38, 2e38)) == ()
    assert [client for client, _ in overflow_culprit(measured(1e38))] == ["c0"]
    assert overflow_culprit(measured(5.0)) == ()
    assert [client for client, _ in overflow_culprit(measured(0.0, 0.0, 5.0))] == ["c2"]
