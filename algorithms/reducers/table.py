"""The reducers from outside that this process knows, by name, and their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from algorithms.parameters import (
    AlgorithmError,
    Parameters,
    check_builder,
    declared,
    made_by,
    read_parameters,
    unknown,
)
from algorithms.reducers.reducer import Reducer

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
