"""Checks of the options of built-in tasks. Each returns the value and raises TaskError for another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fl_tasks.errors import TaskError

Builder = TypeVar("Builder")


def chosen_model(models: Mapping[str, Builder], model: str) -> Builder:
    """The builder of the option model."""
    if model not in models:
        raise TaskError(f'expected the option model to be one of {", ".join(models)}, got "{model}"')
    return models[model]


def true_or_false(option: str, value: object) -> bool:
    """An option that switches something."""
    if not isinstance(value, bool):
        raise TaskError(f"expected the option {option} to be true or false, got {value!r}")
    return value


def part_of_one(option: str, value: float) -> float:
    """An option that is a share: over 0, up to 1."""
    if isinstance(value, bool) or not 0 < value <= 1:
        raise TaskError(f"expected the option {option} over 0 and up to 1, got {value!r}")
    return float(value)


def whole_number(option: str, value: float, least: int = 0) -> int:
    """An option that is a whole number of `least` or more."""
    if isinstance(value, bool) or value != int(value) or value < least:
        raise TaskError(f"expected the option {option} to be a whole number of {least} or more, got {value!r}")
    return int(value)
