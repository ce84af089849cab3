"""Reducers from outside: the checks of what they return, and the geometry that a selection gets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import algorithms as fl

VALUES = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
WEIGHTS = torch.tensor([0.5, 0.5], dtype=torch.float64)


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        pytest.param(lambda v, p: v[0].float(), r"got a tensor of shape \[2\] and torch.float32", id="dtype"),
        pytest.param(lambda v, p: v, r"got a tensor of shape \[2, 2\] and torch.float64", id="shape"),
        pytest.param(lambda v, p: 1.0, "expected 2 entries of float64, got float", id="no-tensor"),
        pytest.param(lambda v, p: v[5], "reducer odd raised IndexError", id="raises"),
    ],
)
def test_a_wrong_result_is_refused(reduce: Callable[[Tensor, Tensor], Tensor], expected: str) -> None:
    """The message names the reducer, what was expected and what came."""
    with pytest.raises(fl.AlgorithmError, match=expected):
        fl.Reducer(reduce=reduce).reduced("odd", VALUES, WEIGHTS)


@pytest.mark.parametrize("chosen", [[], [2], [-1, 0]])
def test_a_wrong_selection_is_refused(chosen: list[int]) -> None:
    """Nothing, or an index that no update has."""
    reducer = fl.Reducer(select=lambda geometry, weights: chosen)
    with pytest.raises(fl.AlgorithmError, match="expected at least one index from 0 to 1"):
        reducer.selected("odd", fl.Geometry(WEIGHTS, VALUES), WEIGHTS)


def test_a_selection_is_in_rising_order_without_repeats() -> None:
    """The mean that follows is taken in the order of client ids."""
    reducer = fl.Reducer(select=lambda geometry, weights: [1, 0, 1])
    assert reducer.selected("odd", fl.Geometry(WEIGHTS, VALUES), WEIGHTS) == (0, 1)


def test_a_reducer_does_one_of_both() -> None:
    """Neither reduces nor selects, or both; and it needs an update."""
    wrongs: tuple[Callable[[], object], ...] = (
        fl.Reducer,
        lambda: fl.Reducer(reduce=lambda v, p: v[0], select=lambda g, p: [0]),
        lambda: fl.Reducer(reduce=lambda v, p: v[0], fewest=0),
    )
    for wrong in wrongs:
        with pytest.raises(fl.AlgorithmError, match="a reducer: expected"):
            wrong()


def test_cosines_follow_from_lengths_and_distances() -> None:
    """Deltas (3, 0), (0, 4) and 0: a right angle, and no angle with 0."""
    deltas = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    distances = (deltas[:, None] - deltas[None, :]).square().sum(dim=2)
    cosines = fl.Geometry(deltas.square().sum(dim=1), distances).cosines
    assert cosines.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
