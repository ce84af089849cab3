"""Schedules of a method's parameters: eta_g, alpha, rho and a few others as functions of the round.

    constant  value of the parameter in every round
    linear    from the parameter's value in round 0 to `end` in round T - 1
    cosine    the same, along half a period of a cosine: slow, fast, slow
    step      the parameter's value, multiplied by `factor` in each of the rounds `milestones`

T is the run's planned number of rounds. Later rounds have the value of round T - 1, or of the milestones so far. A
value depends on the round alone, so it is the same after a restart, in a replay and in a run that was extended. A
schedule whose values are all equal gives the bits of no schedule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from algorithms.base import Algorithm
from algorithms.parameters import AlgorithmError, Parameters, Value, unknown
from algorithms.registry import build, parameters_of

Kind = Literal["constant", "linear", "cosine", "step"]
MAX_MILESTONES = 100


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one parameter changes from round to round.

    Raises:
        AlgorithmError: a field that the kind needs is missing, one that it does not read is given, or a value is wrong.
    """

    kind: Kind
    end: float | None = None
    """The value in the last planned round, of linear and cosine."""
    milestones: tuple[int, ...] = ()
    """The rounds at which step changes the value, in order."""
    factor: float | None = None
    """The factor of step, over 0; at each milestone the value is multiplied by it."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise AlgorithmError(f"kind: expected one of {', '.join(get_args(Kind))}; got {self.kind!r}")
        wanted = {"constant": set[str](), "step": {"milestones", "factor"}}.get(self.kind, {"end"})
        given = {name for name in ("end", "milestones", "factor") if getattr(self, name) not in (None, ())}
        if missing := sorted(wanted - given):
            raise AlgorithmError(f"{missing[0]}: expected a value with kind = {self.kind!r}, got none")
        if extra := sorted(given - wanted):
            raise AlgorithmError(f"{extra[0]}: expected no value with kind = {self.kind!r}, which does not read it")
        if any(a >= b for a, b in itertools.pairwise((-1, *self.milestones))):
            raise AlgorithmError(f"milestones: expected rounds from 0 on, in order, got {list(self.milestones)}")
        if len(self.milestones) > MAX_MILESTONES:
            raise AlgorithmError(f"milestones: expected at most {MAX_MILESTONES}, got {len(self.milestones)}")
        if self.factor is not None and not 0.0 < self.factor < math.inf:
            raise AlgorithmError(f"factor: expected a number over 0, got {self.factor:g}")
        if self.end is not None and not math.isfinite(self.end):
            raise AlgorithmError(f"end: expected a finite number, got {self.end:g}")

    def value(self, start: float, round: int, rounds: int) -> float:
        """The parameter in a round. start: its value in round 0; rounds: T."""
        if self.kind == "step":
            return start * (self.factor or 1.0) ** sum(milestone <= round for milestone in self.milestones)
        if self.end is None or round <= 0:
            return start
        if round >= rounds - 1:
            return self.end
        done = round / (rounds - 1)
        left = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        value = self.end + (start - self.end) * left
        return min(max(value, min(start, self.end)), max(start, self.end))

    def turns(self, rounds: int) -> set[int]:
        """The rounds with an extreme value: a range that has these values has all of them."""
        return {0, max(0, rounds - 1), *self.milestones}


Schedules = Mapping[str, Schedule]
"""The schedules by the parameter's name."""


def values_in(parameters: Mapping[str, Value], schedules: Schedules, round: int, rounds: int) -> dict[str, Value]:
    """A method's parameters in a round. parameters: complete, with the values of round 0; rounds: T."""
    return {
        name: schedules[name].value(float(value), round, rounds) if name in schedules else value
        for name, value in parameters.items()
    }


def at_round(algorithm: Algorithm, schedules: Schedules, round: int, rounds: int) -> Algorithm:
    """The method with its parameters of a round. Its state fits the other rounds' methods.

    Args:
        algorithm: of `build`, with the values of round 0.
        schedules: by the parameter's name, after `check_schedules`.
        round: t, counted from 0.
        rounds: T, the planned number of rounds.
    """
    values = values_in(algorithm.parameters, schedules, round, rounds)
    return algorithm if values == algorithm.parameters else build(algorithm.name, **values)


def check_schedules(algorithm: Algorithm, schedules: Schedules, rounds: int) -> None:
    """Raises AlgorithmError, which names the parameter, unless the method can have these schedules over T rounds."""
    declarations = parameters_of(algorithm.name, **algorithm.parameters)
    for name, schedule in schedules.items():
        _check_name(algorithm.name, name, declarations)
        for round in sorted(schedule.turns(rounds)):
            try:
                at_round(algorithm, {name: schedule}, round, rounds)
            except OverflowError:
                raise AlgorithmError(
                    f"{algorithm.name}, parameter {name!r}: expected a finite number in every round, got another in "
                    f"round {round}; choose a factor closer to 1"
                ) from None


def _check_name(method: str, name: str, declarations: Parameters) -> None:
    allowed = [scheduled for scheduled, parameter in declarations.items() if parameter.per_round]
    if name not in declarations:
        raise AlgorithmError(unknown(f"parameter of {method}", name, allowed))
    if name not in allowed:
        raise AlgorithmError(
            f"{method}, parameter {name!r}: expected a schedule for one of {', '.join(sorted(allowed))}; "
            f"{name} is the same in all rounds"
        )
