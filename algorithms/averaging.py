"""The averaged model: a mean of a run's committed models (Polyak and Ruppert), which is never trained from.

    ema(g)      s_t = g s_{t-1} + (1 - g) x_t,  mean s_t / (1 - g^n)     n models since round 0
    tail(t0)    s_t = s_{t-1} + x_t since round t0,  mean s_t / n        n models since round t0
    window(W)   two sums: a restarts in rounds 0, W, 2W, ...; b restarts W/2 rounds later. The one with more models
                counts, which are W/2 to W of the latest ones, or all as long as there are fewer

The sums are in float64, and only the mean is rounded, once. Every operation treats each entry by itself, so the sums
can be computed block by block with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Term(NamedTuple):
    """One step of a sum: s <- keep s + take x. keep 0: the sum begins again."""

    keep: float
    take: float


class Mean(NamedTuple):
    """The mean in a round: a sum, and what it is divided by."""

    sum: str
    divisor: float
    models: int
    """Number of models in the sum."""


@dataclass(frozen=True, slots=True)
class Averaging:
    """How models are averaged. method: "ema", "tail" or "window"; the value of the same line of the module's text."""

    method: str
    decay: float = 0.0
    start: int = 0
    window: int = 0

    def terms(self, round_: int) -> Mapping[str, Term]:
        """The step of each sum when the model of a round is committed, by the sum's name; empty before the start."""
        counts = self._counts(round_)
        if self.method == "ema":
            return {name: Term(self.decay if count > 1 else 0.0, 1.0 - self.decay) for name, count in counts.items()}
        return {name: Term(1.0 if count > 1 else 0.0, 1.0) for name, count in counts.items()}

    def mean(self, round_: int) -> Mean | None:
        """The mean after a round; None before the start."""
        counts = self._counts(round_)
        if not counts:
            return None
        name, count = max(counts.items(), key=lambda counted: counted[1])
        return Mean(name, 1.0 - self.decay**count if self.method == "ema" else float(count), count)

    def _counts(self, round_: int) -> dict[str, int]:
        """Models in each sum after a round."""
        if self.method == "window":
            half = self.window // 2
            ages = {"a": round_ % self.window, "b": (round_ - half) % self.window if round_ >= half else -1}
            return {name: age + 1 for name, age in ages.items() if age >= 0}
        return {"a": round_ - self.start + 1} if round_ >= self.start else {}


def stepped(before: torch.Tensor | None, x: torch.Tensor, term: Term) -> torch.Tensor:
    """A block of a sum after a step, in float64. before: the same block before it, which is overwritten.

    Products and sums are separate operations: a fused one would round differently at the end of a block.
    """
    taken = x.double() if term.take == 1.0 else x.double() * term.take
    if before is None:
        return taken
    if term.keep != 1.0:
        before.mul_(term.keep)
    return before.add_(taken)


def mean_of(total: torch.Tensor, mean: Mean, dtype: torch.dtype) -> torch.Tensor:
    """A block of the mean, from a block of the sum."""
    return (total / mean.divisor).to(dtype)
