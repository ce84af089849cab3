"""How a class of laws gets its cases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from algorithms.conformance.cases import Law, MethodCase, ReducerCase


def parametrize(metafunc: pytest.Metafunc, cases: Mapping[str, Sequence[MethodCase | ReducerCase]]) -> None:
    """Give each test the cases of the argument that it has."""
    for argument, members in cases.items():
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, members, ids=[each.label for each in members])


def skip_exempt(case: MethodCase | ReducerCase, law: Law) -> None:
    """Skip a law that cannot hold for the case."""
    if law in case.exempt:
        pytest.skip(case.exempt[law])
