"""Weights of updates by their staleness, for a server that steps without waiting for all clients.

The staleness s of an update is the number of server steps between the model that its client started from and the model
that it is added to. An update of the current model has s = 0 and the weight 1.

    constant    w(s) = 1
    polynomial  w(s) = (1 + s)^-exponent
    hinge       w(s) = 1 for s <= after,  else 1 / (slope (s - after) + 1)

The three are those of Xie, Koyejo, Gupta: Asynchronous Federated Optimization, arXiv 1903.03934, section 5.2. FedBuff
(Nguyen et al., AISTATS 2022) uses the polynomial with exponent 1/2. A function from outside this package is known once
this process has called `add_staleness` for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from algorithms.outside_code import outside_code
from algorithms.parameters import (
    AlgorithmError,
    Positive,
    Range,
    check_builder,
    declared,
    made_by,
    read_parameters,
    unknown,
)


@dataclass(frozen=True, slots=True)
class Staleness:
    """A rule for the weights of stale updates."""

    weight: Callable[[int], float]
    """s -> weight, over 0 and at most 1; 1 for s = 0. It must depend on s alone: a replay computes it again."""

    def weights(self, stalenesses: Iterable[int]) -> tuple[float, ...]:
        """The weights of some updates, checked. Raises AlgorithmError for a weight that is out of range."""
        return tuple(self._checked(staleness) for staleness in stalenesses)

    def _checked(self, staleness: int) -> float:
        if staleness < 0:
            raise ValueError(f"expected a staleness of 0 or more, got {staleness}")
        with outside_code("the weight by staleness", AlgorithmError):
            weight = float(self.weight(staleness))
        if not 0.0 < weight <= 1.0 or (staleness == 0 and weight != 1.0):
            allowed = "1 for an update of the current model" if staleness == 0 else "over 0 and at most 1"
            raise AlgorithmError(f"the weight by staleness: expected {allowed}, got {weight} for staleness {staleness}")
        return weight


def constant() -> Staleness:
    """w(s) = 1."""
    return Staleness(lambda staleness: 1.0)


def polynomial(exponent: Positive = 0.5) -> Staleness:
    """w(s) = (1 + s)^-exponent."""
    return Staleness(lambda staleness: math.pow(1 + staleness, -exponent))


def hinge(slope: Positive = 10.0, after: Annotated[int, Range(at_least=0)] = 4) -> Staleness:
    """w(s) = 1 up to s = after, then 1 / (slope (s - after) + 1)."""
    return Staleness(lambda staleness: 1.0 if staleness <= after else 1.0 / (slope * (staleness - after) + 1.0))


BUILT_IN: Final[Mapping[str, Callable[..., Staleness]]] = {
    rule.__name__: rule for rule in (constant, polynomial, hinge)
}

_OUTSIDE: dict[str, Callable[..., Staleness]] = {}


def add_staleness(name: str, builder: Callable[..., Staleness]) -> None:
    """Make a rule from outside known in this process. It is called with its defaults, and replaces an earlier one.

    Raises:
        AlgorithmError: a built-in rule has the name, or the builder is not annotated to return a Staleness.
    """
    if name in BUILT_IN:
        raise AlgorithmError(f"staleness {name}: expected a name that no built-in rule has: choose another")
    check_builder(name, builder, Staleness)
    made_by(name, builder, read_parameters(name, declared(builder), {}), Staleness).weights(range(3))
    _OUTSIDE[name] = builder


def build_staleness(kind: str, /, **values: object) -> Staleness:
    """The rule of that name; omitted values have their defaults.

    Raises:
        AlgorithmError: the rule or a value is unknown, or a value is out of range.
    """
    builder = BUILT_IN.get(kind) or _OUTSIDE.get(kind)
    if builder is None:
        raise AlgorithmError(unknown("staleness", kind, [*BUILT_IN, *_OUTSIDE]))
    owner = f"staleness {kind}"
    return made_by(owner, builder, read_parameters(owner, declared(builder), values), Staleness)
