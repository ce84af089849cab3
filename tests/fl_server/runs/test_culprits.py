"""Which updates of a closed exchange are too long beside each other, or made its sum overflow."""

from __future__ import annotations

import pytest

from fl_server.norms import NormHistory
from fl_server.run_config import RoundSection, from_stored
from fl_server.runs.culprits import Measured, of_overflow, outliers

SECTION = RoundSection()


def measured(*lengths, vector="delta", **changes):
    """Updates of these norms."""
    return [Measured(f"c{at}", {vector: length}, **changes) for at, length in enumerate(lengths)]


def test_of_three_one_can_be_too_long():
    """100 times the lower median of its round and more; of two nobody, and nobody where that is 0."""
    assert [client for client, _ in outliers(SECTION, NormHistory(), measured(1.0, 2.0, 201.0))] == ["c2"]
    assert outliers(SECTION, NormHistory(), measured(1.0, 2.0, 200.0)) == ()
    assert outliers(SECTION, NormHistory(), measured(1.0, 1e30)) == ()
    assert outliers(SECTION, NormHistory(), measured(0.0, 0.0, 1.0)) == ()


@pytest.mark.parametrize(
    "section",
    [
        RoundSection(max_relative_norm=0),
        RoundSection(over_relative_norm="clip"),
        RoundSection(clients_per_round=3, quorum=3, reducer="median"),
    ],
)
def test_nobody_is_dropped_for_length_where_that_is_off(section):
    """Without the key, where longer ones are clipped, and under a reducer that is made for it."""
    assert outliers(section, NormHistory(), measured(1.0, 1.0, 1e9)) == ()


def test_a_clipped_delta_is_as_long_as_it_counts():
    """What was scaled down by the gate is no culprit, and another payload is not scaled."""
    short = [*measured(1.0, 1.0), Measured("long", {"delta": 1e9}, 1e-9)]
    assert outliers(SECTION, NormHistory(), short) == ()
    gradient = [*measured(1.0, 1.0, vector="full_gradient"), Measured("long", {"full_gradient": 1e9}, 1e-9)]
    assert [client for client, _ in outliers(SECTION, NormHistory(), gradient)] == ["long"]


def test_what_is_known_from_committed_rounds_is_not_compared_again():
    """The gate has kept that limit."""
    history = NormHistory()
    for round_ in range(3):
        history.add(round_, [{"delta": 1.0}])
    assert outliers(SECTION, history, measured(1.0, 1.0, 1e9)) == ()


def test_an_overflow_is_the_longest_ones_doing():
    """One at a time, if it is far longer than the others; alone, if nothing that trains is so long."""
    assert [client for client, _ in of_overflow(measured(1.0, 3e38))] == ["c1"]
    assert [client for client, _ in of_overflow(measured(1.0, 1.0, 1e20, 1e30))] == ["c3"]
    assert of_overflow(measured(1e38, 2e38)) == ()
    assert [client for client, _ in of_overflow(measured(1e38))] == ["c0"]
    assert of_overflow(measured(5.0)) == ()
    assert [client for client, _ in of_overflow(measured(0.0, 0.0, 5.0))] == ["c2"]


def test_a_run_of_an_older_version_keeps_to_its_limits():
    """What its stored configuration does not name is off; what it names stays."""
    spec = {"task": {"name": "digits"}, "round": {"clients_per_round": 2}}
    assert (from_stored(spec).round.max_relative_norm, from_stored(spec).round.max_relative_payload) == (0.0, 0.0)
    named = {**spec, "round": {"max_relative_norm": 3.0}}
    assert (from_stored(named).round.max_relative_norm, from_stored(named).round.max_relative_payload) == (3.0, 0.0)
