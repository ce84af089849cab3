"""Weights by staleness: the published formulas, and rules from outside that are checked."""

from __future__ import annotations

from typing import Any

import pytest

from algorithms.parameters import AlgorithmError, Positive
from algorithms.staleness import Staleness, add_staleness, build_staleness


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("constant", {}, (1.0, 1.0, 1.0)),
        ("polynomial", {}, (1.0, 2**-0.5, 9**-0.5)),
        ("polynomial", {"exponent": 2}, (1.0, 0.25, 1 / 81)),
        ("hinge", {}, (1.0, 1.0, 1 / 41)),
        ("hinge", {"slope": 0.5, "after": 0}, (1.0, 1 / 1.5, 1 / 5)),
    ],
)
def test_published_rules(kind: str, values: dict[str, Any], expected: tuple[float, ...]) -> None:
    """The weights of updates that are 0, 1 and 8 versions old."""
    assert build_staleness(kind, **values).weights([0, 1, 8]) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("polynom", {}, "Did you mean 'polynomial'"),
        ("polynomial", {"exponent": 0}, "exponent.*over 0"),
        ("constant", {"exponent": 1}, "unknown parameter"),
        ("hinge", {"after": 1.5}, "whole number"),
    ],
)
def test_wrong_values_are_named(kind: str, values: dict[str, Any], message: str) -> None:
    """An unknown rule or value says what there is."""
    with pytest.raises(AlgorithmError, match=message):
        build_staleness(kind, **values)


def halving(base: Positive = 2.0) -> Staleness:
    """A rule from outside."""
    return Staleness(lambda staleness: base**-staleness)


def growing() -> Staleness:
    """A rule that gives old updates more weight."""
    return Staleness(lambda staleness: 1.0 + staleness)


def light() -> Staleness:
    """A rule that does not leave a current update as it is."""
    return Staleness(lambda staleness: 0.5)


def test_a_rule_from_outside_has_its_parameters() -> None:
    """It is built like a built-in rule once it is known."""
    add_staleness("mine:halving", halving)
    assert build_staleness("mine:halving", base=4).weights([0, 1, 2]) == (1.0, 0.25, 0.0625)


@pytest.mark.parametrize(
    ("builder", "message"), [(growing, "at most 1, got 2.0 for staleness 1"), (light, "expected 1 for an update")]
)
def test_a_rule_with_impossible_weights_is_refused(builder: Any, message: str) -> None:
    """Weights are over 0 and at most 1, and 1 for an update of the current model."""
    with pytest.raises(AlgorithmError, match=message):
        add_staleness(f"mine:{builder.__name__}", builder)


def test_a_weight_that_is_out_of_range_later_is_refused() -> None:
    """What was right for small values is checked again for each update."""
    rule = Staleness(lambda staleness: 1.0 - 0.2 * staleness)
    with pytest.raises(AlgorithmError, match="for staleness 7"):
        rule.weights([0, 7])
