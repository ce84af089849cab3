"""What values a method's parameters may take, written where the method is built.

A builder's signature says it all, as in `def fedcm(alpha: Share = 0.1, ...)`: name, type, range and default.
"""

from __future__ import annotations

import difflib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

Value = float | int | str | bool


class AlgorithmError(ValueError):
    """An algorithm was asked for that cannot be: the name, a parameter or a combination is wrong."""


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers between two bounds; a bound is outside (over, below) or inside (at_least, at_most)."""

    over: float = -math.inf
    at_least: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf

    def __contains__(self, number: float) -> bool:
        inside = self.at_least <= number <= self.at_most and self.over < number < self.below
        return inside and abs(number) <= sys.float_info.max

    def __str__(self) -> str:
        bounds = (("over", self.over), ("at least", self.at_least), ("below", self.below), ("at most", self.at_most))
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound))


Positive = Annotated[float, Range(over=0)]
NonNegative = Annotated[float, Range(at_least=0)]
Share = Annotated[float, Range(over=0, at_most=1)]
Decay = Annotated[float, Range(at_least=0, below=1)]
"""The beta of a moving average or of a momentum; 0 is no memory."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """What may be given for one parameter."""

    kind: Any
    """Its annotation: a number with its Range, a Literal, or bool."""
    default: Value


Parameters = Mapping[str, Parameter]


@cache
def declared(builder: Callable[..., object]) -> Parameters:
    """The parameters of a builder, as its signature has them."""
    kinds = get_type_hints(builder, include_extras=True)
    return {
        name: Parameter(kinds[name], parameter.default)
        for name, parameter in inspect.signature(builder).parameters.items()
    }


def read_parameters(owner: str, parameters: Parameters, given: Mapping[str, object]) -> dict[str, Value]:
    """All parameters with their values: the given ones checked, defaults for the others.

    A whole number may come as 5.0, a real one as 5: the value returned has the declared type.

    Raises:
        AlgorithmError: a parameter that `owner` does not have, or a value out of its range.
    """
    for name in given:
        if name not in parameters:
            raise AlgorithmError(unknown(f"parameter of {owner}", name, parameters))
    values = {}
    for name, parameter in parameters.items():
        try:
            values[name] = _read(parameter.kind, given.get(name, parameter.default))
        except AlgorithmError as error:
            raise AlgorithmError(f"{owner}, parameter {name!r}: {error}") from None
    return values


def unknown(what: str, name: str, available: Iterable[str]) -> str:
    """The message for a name that is not among the available ones; a near one is suggested."""
    names = sorted(available)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what}: {name!r}.{hint} Available: {', '.join(names)}."


def _read(kind: Any, value: Any) -> Value:
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise AlgorithmError(f"expected one of {', '.join(get_args(kind))}; got {value!r}")
        choice: str = value
        return choice
    if kind is bool:
        if not isinstance(value, bool):
            raise AlgorithmError(f"expected true or false; got {value!r}")
        return value
    number, limits = get_args(kind)
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in limits or number(value) != value:
        raise AlgorithmError(f"expected a {'whole ' if number is int else ''}number {limits}; got {value!r}")
    return float(value) if number is float else int(value)
