"""The laws of reducers, as a class of tests: a subclass lists its cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import algorithms as fl
from algorithms.conformance.cases import ReducerCase, parametrize, skip_exempt
from algorithms.reducers.robust import squared_distances

ENTRIES = 37


def contributions(count: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """(values [count, 37], weights [count]): different, of both signs, float64; the weights sum to one."""
    random = torch.Generator().manual_seed(seed)
    weights = torch.rand(count, generator=random, dtype=torch.float64) + 0.5
    return torch.randn(count, ENTRIES, generator=random, dtype=torch.float64), weights / weights.sum()


def result(reducer: fl.Reducer, values: Tensor, weights: Tensor) -> Tensor:
    """[entries]: what the reducer makes of whole deltas; a selection is followed by the weighted mean."""
    if reducer.select is None:
        return reducer.reduced("the reducer", values, weights)
    squares = values.square().sum(dim=1)
    kept = list(reducer.selected("the reducer", fl.Geometry(squares, squared_distances(values)), weights))
    p = weights[kept] / weights[kept].sum()
    return (p[:, None] * values[kept]).sum(dim=0)


def close(a: Tensor, b: Tensor) -> None:
    """Equal to 1e-12."""
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


class ReducerLaws:
    """Every reducer satisfies these."""

    cases: ClassVar[Sequence[ReducerCase]] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each law for each case, with the fewest updates and with more."""
        parametrize(metafunc, {"case": self.cases})
        if "more" in metafunc.fixturenames:
            metafunc.parametrize("more", (0, 1, 4), ids=lambda more: f"fewest-and-{more}")

    def test_equal_updates_are_the_result(self, case: ReducerCase, more: int) -> None:
        """If all clients send the same, the result is the same, as with the mean."""
        reducer = case.build()
        values, weights = contributions(reducer.fewest + more)
        close(result(reducer, values[:1].expand_as(values).clone(), weights), values[0])

    def test_order_of_clients_does_not_matter(self, case: ReducerCase, more: int) -> None:
        """With updates and weights in another order the result is the same to tolerance."""
        reducer = case.build()
        values, weights = contributions(reducer.fewest + more)
        close(result(reducer, values.flip(0), weights.flip(0)), result(reducer, values, weights))

    def test_result_lies_between_the_updates(self, case: ReducerCase, more: int) -> None:
        """No entry lies outside the values of the clients, up to rounding."""
        skip_exempt(case, "weighted mean")
        reducer = case.build()
        values, weights = contributions(reducer.fewest + more)
        came = result(reducer, values, weights)
        assert bool((came >= values.amin(dim=0) - 1e-12).all())
        assert bool((came <= values.amax(dim=0) + 1e-12).all())

    def test_result_shifts_with_the_updates(self, case: ReducerCase, more: int) -> None:
        """Translation: the same vector added to every update is added to the result."""
        skip_exempt(case, "translation")
        reducer = case.build()
        values, weights = contributions(reducer.fewest + more)
        by = torch.linspace(-0.01, 0.01, ENTRIES, dtype=torch.float64)
        close(result(reducer, values + by, weights), result(reducer, values, weights) + by)

    def test_result_scales_with_the_updates(self, case: ReducerCase, more: int) -> None:
        """Units do not matter: updates four times as long give a result four times as long."""
        reducer = case.build()
        values, weights = contributions(reducer.fewest + more)
        close(result(reducer, 4.0 * values, weights), 4.0 * result(reducer, values, weights))

    def test_inputs_stay_unchanged(self, case: ReducerCase, more: int) -> None:
        """A reducer writes into neither values nor weights, and computes the same again."""
        reducer = case.build()
        values, weights = contributions(reducer.fewest + more)
        before, p = values.clone(), weights.clone()
        first = result(reducer, values, weights)
        assert torch.equal(values, before)
        assert torch.equal(weights, p)
        assert torch.equal(first, result(reducer, values, weights))

    def test_cutting_into_blocks_changes_no_bit(self, case: ReducerCase, more: int) -> None:
        """Results of slices, cut anywhere, are the slices of the result."""
        reducer = case.build()
        if reducer.reduce is None:
            pytest.skip("it selects whole updates")
        values, weights = contributions(reducer.fewest + more)
        whole = reducer.reduced(case.name, values, weights)
        for at in (1, 2, 19, ENTRIES - 1):
            pieces = [
                reducer.reduced(case.name, part.clone(), weights) for part in values.split([at, ENTRIES - at], dim=1)
            ]
            assert torch.equal(torch.cat(pieces), whole)
