"""The search for a method's setting: the choices to try, and the best one."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from statistics import fmean
from typing import Any

from fl_ops.compare.cells import CellResult, Choice
from fl_ops.compare.table import MethodSection, TuningSection

Search = Generator[list[Choice], Sequence[float], Choice]
"""Yields choices to try, receives their scores in the same order, returns the best one."""


def search(method: MethodSection, tuning: TuningSection) -> Search:
    """The search of the table's section [tuning]. Of equal scores, the first choice wins."""
    variants = method.variants()
    if tuning.search == "grid" or len(variants) == 1:
        return (yield from _best([choice for variant in variants for choice in _rates(tuning, variant)]))
    start = yield from _best(_rates(tuning, variants[0]))
    other = yield from _best([Choice(start.learning_rate, variant) for variant in variants])
    if other == start:
        return start
    return (yield from _best(_rates(tuning, other.parameters)))


def score(result: CellResult, last: int) -> float:
    """Mean accuracy of the last evaluations; -inf for a run that diverged."""
    reached = result.accuracies[-last:]
    return fmean(reached) if reached and result.diverged is None else -math.inf


def most_tried(method: MethodSection, tuning: TuningSection) -> int:
    """Upper bound of the number of choices that a search tries."""
    rates, variants = len(tuning.learning_rates), len(method.variants())
    if tuning.search == "grid" or variants == 1:
        return rates * variants
    return rates + variants - 1 + rates - 1


def _rates(tuning: TuningSection, parameters: Mapping[str, Any]) -> list[Choice]:
    return [Choice(rate, parameters) for rate in tuning.learning_rates]


def _best(choices: list[Choice]) -> Search:
    scores = yield choices
    return choices[max(range(len(choices)), key=scores.__getitem__)]
