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
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

Value = float | int | str | bool


class AlgorithmError(ValueError):
    """An algorithm was asked for that cannot be: the name, a parameter or a combination is wrong."""


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers over one bound, up to and with another."""

    over: float
    at_most: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.over < number <= min(self.at_most, sys.float_info.max)

    def __str__(self) -> str:
        return f"over {self.over:g}" + ("" if self.at_most == math.inf else f" and at most {self.at_most:g}")


Positive = Annotated[float, Range(over=0)]
Share = Annotated[float, Range(over=0, at_most=1)]


def read_parameters(builder: Callable[..., object], given: Mapping[str, object]) -> dict[str, Value]:
    """All parameters of `builder` with their values: the given ones checked, defaults for the others.

    A whole number may come as 5.0, a real one as 5: the value returned has the declared type.

    Raises:
        AlgorithmError: a parameter that `builder` does not have, or a value out of its range.
    """
    kinds = get_type_hints(builder, include_extras=True)
    defaults = {name: parameter.default for name, parameter in inspect.signature(builder).parameters.items()}
    for name in given:
        if name not in defaults:
            raise AlgorithmError(unknown(f"parameter of {builder.__name__}", name, defaults))
    values = {}
    for name, value in {**defaults, **given}.items():
        try:
            values[name] = _read(kinds[name], value)
        except AlgorithmError as error:
            raise AlgorithmError(f"{builder.__name__}, parameter {name!r}: {error}") from None
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
    number, limits = get_args(kind)
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in limits or number(value) != value:
        raise AlgorithmError(f"expected a {'whole ' if number is int else ''}number {limits}; got {value!r}")
    return float(value) if number is float else int(value)
