"""What a run says about its local steps: the optimizer, and the schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from algorithms.parameters import AlgorithmError

State = Literal["fresh", "device", "server"]
Number = float | int
OptimizerValue = Number | str | bool | tuple[Number, ...]
"""A value of an argument of an optimizer's class."""

RateKind = Literal["constant", "linear", "cosine"]

PREFIX = "optimizer."
"""Names of the optimizer's tensors among a method's payloads and states begin with it."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """An optimizer of local steps. The default is plain SGD, y <- y - eta_l * d.

    Raises:
        AlgorithmError: the state is unknown.
    """

    name: str = "sgd"
    """A built-in name, or a class as module:Name (`algorithms.optimizers.classes`)."""
    parameters: Mapping[str, OptimizerValue] = field(default_factory=dict)
    """Arguments of the class, without the learning rate."""
    state: State = "fresh"
    """fresh: it starts anew in each round. device: each device keeps it. server: the server averages it."""

    def __post_init__(self) -> None:
        if self.state not in get_args(State):
            raise AlgorithmError(f"state: expected one of {', '.join(get_args(State))}; got {self.state!r}", "state")

    @property
    def plain(self) -> bool:
        """Whether its steps are those of plain SGD, without momentum and without a weight decay of its own."""
        return self.name in ("", "sgd") and not any(self.parameters.values())


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """A factor of the learning rate over the steps of a round or of a run, or over the rounds of a run.

    With n steps, of which W = warmup * n warm up, the factor of step k, counted from 0, is

        (k + 1) / (W + 1)                                      k < W
        1                                          constant    k >= W,    p = (k - W) / (n - W)
        1 + (end - 1) * p                          linear
        end + (1 - end) * (1 + cos(pi p)) / 2      cosine

    It is over 0 in every step: `end` is the value after the last one. Later steps have the value of the last one.

    Raises:
        AlgorithmError: the kind is unknown, or a value is out of range.
    """

    kind: RateKind = "constant"
    warmup: float = 0.0
    """Share of all steps; at least 0, below 1."""
    end: float | None = None
    """The last value of linear and cosine; at least 0. None: 0."""
    first: int = 0
    """The number of a round's first step among `total`."""
    total: int = 0
    """n, if the schedule runs over the steps of many rounds. 0: over those of each round."""

    def __post_init__(self) -> None:
        if min(self.first, self.total) < 0:
            raise AlgorithmError(f"total: expected counts of steps, got {self.first} of {self.total}", "total")
        if self.kind not in get_args(RateKind):
            raise AlgorithmError(f"kind: expected one of {', '.join(get_args(RateKind))}; got {self.kind!r}", "kind")
        if not 0.0 <= self.warmup < 1.0:
            raise AlgorithmError(f"warmup: expected a share of at least 0 and below 1, got {self.warmup:g}", "warmup")
        if self.end is not None and self.kind == "constant":
            raise AlgorithmError('end: expected no value with kind = "constant", which does not read it', "end")
        if self.end is not None and not 0.0 <= self.end < math.inf:
            raise AlgorithmError(f"end: expected a factor of 0 or more, got {self.end:g}", "end")

    @property
    def constant(self) -> bool:
        """Whether the factor is always 1."""
        return (self.kind == "constant" or self.end == 1.0) and not self.warmup

    def factor(self, step: int, steps: int) -> float:
        """The factor of a step. step: from 0, in its round; steps: all of the round, 1 or more."""
        if self.total:
            step, steps = self.first + step, self.total
        step, warm = min(max(step, 0), steps - 1), self.warmup * steps
        if step < warm:
            return (step + 1) / (warm + 1)
        done, end = (step - warm) / (steps - warm), self.end or 0.0
        if self.kind == "linear":
            return 1.0 + (end - 1.0) * done
        if self.kind == "cosine":
            return end + (1.0 - end) * 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0
