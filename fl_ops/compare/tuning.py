"""The search for a method's setting: the short runs of a grid, its extension beyond an edge, and the judgement.

Short runs under one seed favour settings that start fast, and a rate that is slightly too high may diverge later or
under another seed. With `tuning.judge_seeds`, the best settings therefore run again, with all rounds and several seeds.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from statistics import fmean
from typing import NamedTuple

from fl_ops.compare.cells import CellResult, Choice, Stage
from fl_ops.compare.table import MethodSection, TuningSection
from fl_server.rounds.metrics import Criterion

_DIGITS = 6
"""Significant digits of a rate beyond the grid."""


class Trial(NamedTuple):
    """A run that a search asks for."""

    choice: Choice
    stage: Stage
    seed: int


Search = Generator[list[Trial], Sequence[float], Choice]
"""Yields runs to do, receives their scores in the same order, returns the best setting."""

_Step = Generator[list[Trial], Sequence[float], None]


def search(method: MethodSection, tuning: TuningSection) -> Search:
    """The search of the table's section [tuning]. Of equal scores, the first setting wins."""
    variants = method.variants(learning_rate=0.0)
    state = _State(tuning, method.learning_rates or tuning.learning_rates)
    if tuning.search == "climb":
        yield from state.climb(variants, tuning.cells or 0)
    elif tuning.search == "grid" or len(variants) == 1:
        yield from state.try_grid(variants)
    else:
        yield from state.try_grid(variants[:1])
        start = state.best()
        yield from state.run([variant.at(start.learning_rate) for variant in variants])
        if not (other := state.best()).equals_but_rate(start):
            yield from state.try_grid([other])
    if tuning.judge_seeds:
        return (yield from _judge(state))
    return state.best()


def score(result: CellResult, last: int, criterion: Criterion) -> float:
    """Mean of the last evaluations, negated if lower is better; -inf for a run that diverged."""
    reached = result.accuracies[-last:]
    if not reached or result.diverged is not None or not math.isfinite(mean := fmean(reached)):
        return -math.inf
    return -mean if criterion.lower_is_better else mean


def at_edge(choice: Choice, tried: Sequence[Choice], grid: Sequence[float]) -> bool:
    """Whether no lower or no higher rate was tried for this setting; a better one may be there."""
    rates = _rates(choice, tried, [choice.learning_rate])
    return len(grid) > 1 and choice.learning_rate in (rates[0], rates[-1])


def usual_trials(method: MethodSection, tuning: TuningSection) -> int:
    """Number of short runs of a search that does not extend its grid."""
    rates, variants = len(method.learning_rates or tuning.learning_rates), len(method.variants(0.0))
    if tuning.cells is not None:
        return tuning.cells
    if tuning.search == "grid" or variants == 1:
        return rates * variants
    return rates + variants - 1 + rates - 1


def usual_judged(tuning: TuningSection) -> int:
    """Number of long runs of a search in which two settings are near."""
    return 2 * len(tuning.judge_seeds)


class _State:
    """What a search knows: the settings with their scores, in the order in which they were tried."""

    def __init__(self, tuning: TuningSection, grid: Sequence[float]) -> None:
        self._tuning = tuning
        self._grid = grid
        self.scores: list[tuple[Choice, float]] = []
        self.judged: list[tuple[Choice, float]] = []

    def try_grid(self, variants: Sequence[Choice]) -> _Step:
        """Run every rate of these settings, then those beyond an edge for as long as the edge is the best."""
        yield from self.run([variant.at(rate) for variant in variants for rate in self._grid])
        while further := self.beyond(self.best()):
            yield from self.run([further])

    def climb(self, variants: Sequence[Choice], cells: int) -> _Step:
        """Run every rate of the first setting, then the neighbours of the best one, until so many cells have run.

        If the best setting has no neighbour that was not tried, the next best one's are.
        """
        yield from self.run([variants[0].at(rate) for rate in self._grid][:cells])
        while (left := cells - len(self.scores)) > 0:
            ranked = sorted(self.scores, key=lambda scored: -scored[1])  # stable: of equal scores the first one
            new = next(filter(None, (self._neighbours(choice, variants) for choice, _ in ranked)), [])
            if not new:
                return
            yield from self.run(new[:left])

    def _neighbours(self, choice: Choice, variants: Sequence[Choice]) -> list[Choice]:
        """The settings that were not tried and differ from this one in one value: the rates beside it first."""
        known = [choice for choice, _ in self.scores]
        rates = sorted({*self._grid, *(tried.learning_rate for tried in known)})
        at = rates.index(choice.learning_rate)
        beside = [choice.at(rate) for rate in (*rates[max(0, at - 1) : at], *rates[at + 1 : at + 2])]
        own = [variant.at(choice.learning_rate) for variant in variants if _differences(variant, choice) == 1]
        further = self._extended(choice, rates)
        return [choice for choice in [*beside, *([further] if further else []), *own] if choice not in known]

    def run(self, choices: Sequence[Choice]) -> _Step:
        """Short runs of the settings that have none."""
        known = [choice for choice, _ in self.scores]
        if new := [choice for choice in choices if choice not in known]:
            reached = yield [Trial(choice, "tuning", self._tuning.seed) for choice in new]
            self.scores += zip(new, reached, strict=True)

    def judge(self, choices: Sequence[Choice]) -> _Step:
        """Long runs of these settings under every seed; a setting's score is the mean."""
        seeds = self._tuning.judge_seeds
        reached = yield [Trial(choice, "judging", seed) for choice in choices for seed in seeds]
        parts = [reached[start : start + len(seeds)] for start in range(0, len(reached), len(seeds))]
        self.judged += zip(choices, map(fmean, parts), strict=True)

    def best(self) -> Choice:
        """The setting with the highest score of the short runs."""
        return _best(self.scores)

    def score(self, choice: Choice) -> float:
        """The score of a setting's short run."""
        return next(value for tried, value in self.scores if tried == choice)

    def not_judged(self) -> list[tuple[Choice, float]]:
        """Settings with short runs that did not diverge, and without long ones."""
        judged = [choice for choice, _ in self.judged]
        return [(choice, value) for choice, value in self.scores if choice not in judged and value > -math.inf]

    def near(self, value: float) -> float:
        """The lowest score that counts as near this one."""
        return value - self._tuning.near

    def beyond(self, choice: Choice) -> Choice | None:
        """The setting with the next rate beyond the edge at which this one is; None inside the grid or at the bound."""
        return self._extended(choice, _rates(choice, [tried for tried, _ in self.scores], self._grid))

    def _extended(self, choice: Choice, rates: Sequence[float]) -> Choice | None:
        """See `beyond`; rates: those that count as tried, from the lowest."""
        if len(self._grid) == 1:
            return None
        base = sorted(self._grid)
        low, high = choice.learning_rate == rates[0], choice.learning_rate == rates[-1]
        if low and rates.index(base[0]) < self._tuning.extend:
            return choice.at(_rounded(rates[0] * base[0] / base[1]))
        if high and rates[::-1].index(base[-1]) < self._tuning.extend:
            return choice.at(_rounded(rates[-1] * base[-1] / base[-2]))
        return None


def _judge(state: _State) -> Search:
    """The best setting by long runs.

    First the best settings of the short runs are judged. Then, as long as a setting that was not judged has a higher
    score in its short run than the best one in its long runs, that setting: the long runs of the others failed.
    """
    if not state.not_judged():
        return state.best()
    yield from state.judge(_contenders(state, -math.inf))
    while True:
        best = _best(state.judged)
        if doubted := _contenders(state, max(value for _, value in state.judged)):
            yield from state.judge(doubted)
        elif further := state.beyond(best):
            yield from state.run([further])
            if state.score(further) >= state.near(state.score(best)):
                yield from state.judge([further])
        else:
            return best


def _contenders(state: _State, over: float) -> list[Choice]:
    """The best of the settings that were not judged with a score over this value, and those near it."""
    left = [(choice, value) for choice, value in state.not_judged() if value > over]
    lowest = state.near(max((value for _, value in left), default=0.0))
    return [choice for choice, value in left if value >= lowest]


def _best(scores: Sequence[tuple[Choice, float]]) -> Choice:
    """The first one with the highest score. If all diverged, the one with the lowest rate."""
    if all(value == -math.inf for _, value in scores):
        return min((choice for choice, _ in scores), key=lambda choice: choice.learning_rate)
    return max(scores, key=lambda scored: scored[1])[0]


def _rates(choice: Choice, tried: Sequence[Choice], grid: Sequence[float]) -> list[float]:
    """The rates of the grid and those that were tried with all else as in this setting, from the lowest."""
    return sorted({*grid, *(other.learning_rate for other in tried if other.equals_but_rate(choice))})


def _differences(one: Choice, other: Choice) -> int:
    """Number of own parameters and keys of [local] in which two settings differ."""
    return sum(one.own.get(key) != other.own.get(key) for key in one.own.keys() | other.own.keys())


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")
