"""Marks of parametrized tests: which cases `make test` runs, and which only `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """The cases of a parametrization: `kept` as they are, all others marked slow.

    A case is the value of one argument, or a tuple with one value for each argument.

    Raises:
        ValueError: If a kept case is not one of the cases, so that a renamed case does not disappear from `make test`.
    """
    every = list(cases)
    if missing := [case for case in kept if case not in every]:
        raise ValueError(f"expected cases of {every}, got {missing}; correct the kept cases")
    return [case if case in kept else _slow(case) for case in every]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
