"""From a name and parameters, as they stand in a configuration or on the wire, to an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from algorithms.base import Algorithm
from algorithms.compose import Method, compose
from algorithms.fedavg import fedavg
from algorithms.fedcm import fedcm
from algorithms.parameters import AlgorithmError, read_parameters, unknown

METHODS: Mapping[str, Callable[..., Method]] = {builder.__name__: builder for builder in (fedavg, fedcm)}


def names() -> tuple[str, ...]:
    """The methods that `build` knows, sorted."""
    return tuple(sorted(METHODS))


def build(name: str, /, **parameters: object) -> Algorithm:
    """The method called `name`; parameters by the paper's symbols, defaults for those that are not given.

    Raises:
        AlgorithmError: no such method, no such parameter, or a value out of its range.
    """
    if name not in METHODS:
        raise AlgorithmError(unknown("algorithm", name, METHODS))
    values = read_parameters(METHODS[name], parameters)
    return compose(name, values, METHODS[name](**values))
