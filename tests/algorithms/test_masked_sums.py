"""The sums of every method are made of sums that each client contributes to alone, or no such parts are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import algorithms as fl
from algorithms.masked_sums import PROBED, Summand, factors_of, summands_of
from tests.algorithms.test_conformance import ROWS

COHORT = ((31, 4, 0.3), (5, 1, -1.1), (18, 9, 0.7), (2, 2, 5.0))
"""Examples, steps and payload of each client."""
INFO = fl.RoundInfo(1, 0.1, 0.2, rounds=9, population=40, population_examples=400, cohort_size=PROBED)


def parts_of(name: str, parameters: dict[str, Any], steps: int | None) -> dict[str, Summand | None]:
    """The summand of each sum of the method's last exchange."""
    return summands_of(fl.build(name, **parameters).exchanges[-1], INFO, steps)


@pytest.mark.parametrize("steps", [None, 5], ids=["own-steps", "equal-steps"])
@pytest.mark.parametrize("row", ROWS)
def test_the_sums_are_multiples_of_the_parts(row: str, steps: int | None) -> None:
    """S = sum_i c_i v_i by the method is A sum_i w_i v_i, with A of the number of clients and of all examples alone."""
    name, parameters = ROWS[row]
    exchange = fl.build(name, **parameters).exchanges[-1]
    summands = {symbol: part for symbol, part in parts_of(name, parameters, steps).items() if part is not None}
    cohort = [fl.UpdateInfo(str(number), n, steps or k) for number, (n, k, _) in enumerate(COHORT)]
    info = replace(INFO, cohort_size=len(cohort))
    factors = factors_of(exchange, info, summands, (len(cohort), sum(n for n, _, _ in COHORT), steps or 3))
    for symbol, part in summands.items():
        rows = list(zip(cohort, COHORT, strict=True))
        by_parts = factors[symbol] * sum(part.share(one.num_examples, one.num_steps) * v for one, (_, _, v) in rows)
        whole = exchange.sums(cohort, info)[symbol]
        assert part.payload == whole.payload
        assert by_parts == pytest.approx(sum(c * v for c, (_, _, v) in zip(whole.coefficients, COHORT, strict=True)))


@pytest.mark.parametrize(
    ("name", "parameters", "steps", "expected"),
    [
        ("fedcm", {}, 5, {"Dbar": Summand("delta"), "G": Summand("delta")}),
        ("fedcm", {}, None, {"Dbar": Summand("delta"), "G": Summand("delta", per_step=True)}),
        (
            "fedcm",
            {"weights": "examples"},
            None,
            {"Dbar": Summand("delta", by_examples=True), "G": Summand("delta", by_examples=True, per_step=True)},
        ),
        ("scaffold", {}, 5, {"Dbar": Summand("delta"), "C": Summand("delta")}),
        ("scaffold", {"option": "I"}, None, {"Dbar": Summand("delta"), "C": Summand("variate_change")}),
        ("feddyn", {}, None, {"Dbar": Summand("delta"), "H": Summand("delta")}),
        ("mimelite", {}, None, {"Dbar": Summand("delta"), "cbar": Summand("full_gradient")}),
        ("fednova", {}, 5, {"Dbar": Summand("delta", by_examples=True)}),
        ("fednova", {}, None, {"Dbar": None}),
    ],
)
def test_the_parts_of_a_method(
    name: str, parameters: dict[str, Any], steps: int | None, expected: dict[str, Summand | None]
) -> None:
    """FedNova's factor has the mean of the steps, which is not one of the masked sums."""
    assert parts_of(name, parameters, steps) == expected
