"""Types, ranges and defaults of a method's parameters, and their check.

The signature of a method's builder declares them, as in `def fedcm(alpha: Share = 0.1, ...)`.
"""

from __future__ import annotations

import difflib
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from algorithms.outside_code import outside_code

Value = float | int | str | bool
Made = TypeVar("Made")


class AlgorithmError(ValueError):
    """An algorithm cannot be built or run: its name, a parameter or a combination is wrong, or an input is missing.

    parameter: the name of the wrong parameter; empty for other errors.
    """

    def __init__(self, message: str, parameter: str = "") -> None:
        super().__init__(message)
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class Range:
    """Finite numbers between two bounds, exclusive (over, below) or inclusive (at_least, at_most)."""

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


PER_ROUND = "a schedule may change it from round to round"
"""Marks such a parameter in its annotation. The method must be right for any sequence of values."""

Positive = Annotated[float, Range(over=0)]
NonNegative = Annotated[float, Range(at_least=0)]
Share = Annotated[float, Range(over=0, at_most=1)]
Decay = Annotated[float, Range(at_least=0, below=1)]
"""The factor of a moving average or a momentum; 0 for no memory."""

PositivePerRound = Annotated[Positive, PER_ROUND]
NonNegativePerRound = Annotated[NonNegative, PER_ROUND]
SharePerRound = Annotated[Share, PER_ROUND]
DecayPerRound = Annotated[Decay, PER_ROUND]


@dataclass(frozen=True, slots=True)
class Parameter:
    """The declaration of one parameter."""

    kind: Any
    """Its annotation: a number with its Range, a Literal, or bool; each of them or None."""
    default: Value | None
    """None: the parameter may be absent, which has a meaning of its own."""

    @property
    def per_round(self) -> bool:
        """Whether a schedule may change it from round to round."""
        return PER_ROUND in get_args(self.kind)


Parameters = Mapping[str, Parameter]


@cache
def declared(builder: Callable[..., object]) -> Parameters:
    """The parameters that a builder's signature declares."""
    kinds = get_type_hints(builder, include_extras=True)
    return {
        name: Parameter(kinds[name], parameter.default)
        for name, parameter in inspect.signature(builder).parameters.items()
    }


def check_builder(name: str, builder: object, made: type) -> None:
    """Check what a builder from outside declares, without calling it.

    Raises:
        AlgorithmError: it is no function that is annotated to return `made`, or a parameter lacks a type with a range
            or a default.
    """
    example = f"def {name.rpartition(':')[2].replace('-', '_')}(alpha: Share = 0.1) -> {made.__name__}"
    if not inspect.isfunction(builder):
        raise AlgorithmError(f"{name}: expected a function such as {example}, got {type(builder).__name__}")
    with outside_code(f"{name}: reading its annotations", AlgorithmError):
        kinds = get_type_hints(builder, include_extras=True)
    if kinds.get("return") is not made:
        raise AlgorithmError(
            f"{name} is a function that is not annotated to return {made.__name__}, so it was not called: expected one"
            f" such as {example}"
        )
    for parameter in inspect.signature(builder).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise AlgorithmError(f"{name}, parameter {parameter.name!r}: expected a parameter with a name of its own")
        if not _is_kind(kinds.get(parameter.name)):
            raise AlgorithmError(
                f"{name}, parameter {parameter.name!r}: expected a type with its range, such as Share,"
                " Annotated[float, Range(over=0)], bool, or Literal of texts; got"
                f" {kinds.get(parameter.name, 'none')!r}",
                parameter.name,
            )
        if parameter.default is parameter.empty:
            raise AlgorithmError(f"{name}, parameter {parameter.name!r}: expected a default, got none", parameter.name)


def made_by(name: str, builder: Callable[..., object], values: Mapping[str, object], made: type[Made]) -> Made:
    """What a builder makes of the values. Raises AlgorithmError if it fails, or makes something else."""
    with outside_code(name, AlgorithmError):
        result = builder(**values)
    if not isinstance(result, made):
        raise AlgorithmError(f"{name}: expected that it returns a {made.__name__}, got {type(result).__name__}")
    return result


def _is_kind(kind: Any) -> bool:
    """Whether `_read` knows what the annotation allows."""
    if kind is bool or get_origin(kind) is Literal:
        return kind is bool or all(isinstance(choice, str) for choice in get_args(kind))
    if get_origin(kind) in (UnionType, Union):
        others = [member for member in get_args(kind) if member is not NoneType]
        return len(others) == 1 and _is_kind(others[0])
    number, limits, *_ = (*get_args(kind), None, None)
    return get_origin(kind) is Annotated and number in (float, int) and isinstance(limits, Range)


def read_parameters(owner: str, parameters: Parameters, given: Mapping[str, object]) -> dict[str, Value]:
    """The values of all parameters: the given ones, checked, and the defaults of the others, if these are not None.

    5.0 is accepted for a whole number and 5 for a real one. The returned value has the declared type.

    Raises:
        AlgorithmError: `owner` has no such parameter, or a value is out of range.
    """
    for name in given:
        if name not in parameters:
            raise AlgorithmError(unknown(f"parameter of {owner}", name, parameters), name)
    values = {}
    for name, parameter in parameters.items():
        if name not in given and parameter.default is None:
            continue
        try:
            values[name] = _read(parameter.kind, given.get(name, parameter.default))
        except AlgorithmError as error:
            raise AlgorithmError(f"{owner}, parameter {name!r}: {error}", name) from None
    return values


def described(kind: Any) -> str:
    """The values that a parameter of this type accepts, in words."""
    if kind is bool:
        return "true, false"
    if get_origin(kind) is Literal:
        return ", ".join(get_args(kind))
    if get_origin(kind) in (UnionType, Union):
        return f"{described(next(member for member in get_args(kind) if member is not NoneType))}, or none"
    number, limits, *_ = get_args(kind)
    return f"a {'whole ' if number is int else ''}number {limits}".rstrip()


def unknown(what: str, name: str, available: Iterable[str]) -> str:
    """The message for an unknown name. It suggests a similar available name."""
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
    if get_origin(kind) in (UnionType, Union):
        kind = next(member for member in get_args(kind) if member is not NoneType)
    number, limits, *_ = get_args(kind)
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in limits or number(value) != value:
        raise AlgorithmError(f"expected a {'whole ' if number is int else ''}number {limits}; got {value!r}")
    return float(value) if number is float else int(value)
