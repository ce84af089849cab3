"""A reducer: a function that takes the place of the weighted mean of a round's updates.

It gets contributions v_i, whose weighted mean sum_i p_i v_i is the sum that the method asks for (`robust` derives
them), in blocks of some thousand entries. Or it selects updates, whose weighted mean is then taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from algorithms.outside_code import outside_code
from algorithms.parameters import (
    AlgorithmError,
    Parameters,
    check_builder,
    declared,
    made_by,
    read_parameters,
    unknown,
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Lengths and distances of the clients' deltas as admitted, in the order of client id bytes, float64."""

    squared_norms: Tensor
    """|d_i|^2, [clients]."""
    squared_distances: Tensor
    """|d_i - d_j|^2, [clients, clients]; exactly 0 for equal deltas."""

    @property
    def cosines(self) -> Tensor:
        """The cosines of the angles between deltas, [clients, clients]; 0 where a delta is 0."""
        squares = self.squared_norms
        products = (squares[:, None] + squares[None, :] - self.squared_distances) / 2
        lengths = (squares[:, None] * squares[None, :]).sqrt()
        return torch.where(lengths > 0, products / lengths.clamp(min=torch.finfo(lengths.dtype).tiny), 0.0)


@dataclass(frozen=True, slots=True)
class Reducer:
    """A reducer with its parameters: exactly one of `reduce` and `select`.

    Both get the method's weights p_i, [clients], float64, which sum to one. They must depend on their arguments alone:
    a replay computes the same again.

    Raises:
        AlgorithmError: neither or both are given, or `fewest` is not positive.
    """

    reduce: Callable[[Tensor, Tensor], Tensor] | None = None
    """(values [clients, entries], weights) -> [entries], float64. Each entry must depend on its own column alone, for
    the blocks of a model may be cut anywhere."""
    select: Callable[[Geometry, Tensor], Sequence[int]] | None = None
    """(geometry, weights) -> indices of the updates to keep."""
    fewest: int = 1
    """Fewest updates that it is defined for. A run's quorum must be at least as large."""

    def __post_init__(self) -> None:
        if (self.reduce is None) == (self.select is None):
            raise AlgorithmError("a reducer: expected one of reduce and select, got neither or both")
        if self.fewest < 1:
            raise AlgorithmError(f"a reducer: expected fewest of 1 or more, got {self.fewest}")

    def reduced(self, name: str, values: Tensor, weights: Tensor) -> Tensor:
        """The result for one block, checked. name: for messages. Raises AlgorithmError."""
        if self.reduce is None:
            raise AlgorithmError(f"reducer {name} selects updates and reduces no values")
        with outside_code(f"reducer {name}", AlgorithmError):
            result = self.reduce(values, weights)
        if not isinstance(result, Tensor) or result.dtype != torch.float64 or result.shape != values.shape[1:]:
            raise AlgorithmError(
                f"reducer {name}: expected {values.shape[1]} entries of float64, got {_described(result)}"
            )
        return result

    def selected(self, name: str, geometry: Geometry, weights: Tensor) -> tuple[int, ...]:
        """The indices of the updates to keep, checked, in rising order. name: for messages. Raises AlgorithmError."""
        if self.select is None:
            raise AlgorithmError(f"reducer {name} reduces values and selects no updates")
        with outside_code(f"reducer {name}", AlgorithmError):
            chosen = sorted({int(index) for index in self.select(geometry, weights)})
        if not chosen or not 0 <= chosen[0] <= chosen[-1] < len(weights):
            raise AlgorithmError(
                f"reducer {name}: expected at least one index from 0 to {len(weights) - 1}, got {chosen[:10]}"
            )
        return tuple(chosen)


def _described(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a tensor of shape {list(result.shape)} and {result.dtype}"
    return type(result).__name__


BUILT_IN: Final = ("mean", "median", "trimmed_mean", "krum")
"""Reducers of this package; `algorithms.reducers.robust` has their functions."""

_OUTSIDE: dict[str, Callable[..., Reducer]] = {}


def add_reducer(name: str, builder: Callable[..., Reducer]) -> None:
    """Make a reducer from outside known in this process, with its parameters from the builder's signature.

    The builder is called once, with its defaults. It replaces an earlier one of the same name.

    Raises:
        AlgorithmError: a built-in reducer has the name, or the builder declares no reducer.
    """
    if name in BUILT_IN:
        raise AlgorithmError(f"reducer {name}: expected a name that no built-in reducer has: choose another")
    check_builder(name, builder, Reducer)
    made_by(name, builder, read_parameters(name, declared(builder), {}), Reducer)
    _OUTSIDE[name] = builder


def build_reducer(name: str, /, **parameters: object) -> Reducer:
    """The reducer from outside of that name; omitted parameters have their defaults.

    Raises:
        AlgorithmError: the reducer or a parameter is unknown, or a value is out of range.
    """
    return made_by(name, _builder(name), read_parameters(name, reducer_parameters(name), parameters), Reducer)


def reducer_parameters(name: str) -> Parameters:
    """The declarations of its parameters. Raises AlgorithmError for an unknown reducer."""
    return declared(_builder(name))


def _builder(name: str) -> Callable[..., Reducer]:
    if name not in _OUTSIDE:
        raise AlgorithmError(unknown("reducer", name, [*BUILT_IN, *_OUTSIDE]))
    return _OUTSIDE[name]
