"""The cases of the suite, and how a class of laws gets them.

A case is a method or a reducer with parameters, and the laws that cannot hold for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

import algorithms as fl

Law = Literal["translation", "optimum", "weighted mean"]
"""Laws that a case may be exempt from."""


@dataclass(frozen=True)
class MethodCase:
    """A method with parameters."""

    label: str
    """The name of the case in the report."""
    method: str | Callable[..., fl.Method]
    """A known method's name, or a method's function, which becomes known by the function's name."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    exempt: Mapping[Law, str] = field(default_factory=dict)
    """Laws that do not hold -> the reason, which the report shows."""
    rounds: int = 160
    """Rounds in which it comes within 1e-8 of the optimum, for the law "optimum"."""

    @property
    def name(self) -> str:
        """The method's name for `algorithms.build`."""
        if isinstance(self.method, str):
            return self.method
        fl.add_method(self.method.__name__, self.method)
        return self.method.__name__

    def build(self, **parameters: Any) -> fl.Algorithm:
        """The method with the parameters of the case and these."""
        return fl.build(self.name, **{**self.parameters, **parameters})


@dataclass(frozen=True)
class ReducerCase:
    """A reducer with parameters."""

    label: str
    reducer: str | Callable[..., fl.Reducer]
    """A known reducer's name, or a reducer's function, which becomes known by the function's name."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    exempt: Mapping[Law, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The reducer's name for `algorithms.build_reducer`."""
        if isinstance(self.reducer, str):
            return self.reducer
        fl.add_reducer(self.reducer.__name__, self.reducer)
        return self.reducer.__name__

    def build(self) -> fl.Reducer:
        """The reducer with the parameters of the case."""
        return fl.build_reducer(self.name, **self.parameters)


def parametrize(metafunc: pytest.Metafunc, cases: Mapping[str, Sequence[MethodCase | ReducerCase]]) -> None:
    """Give each test the cases of the argument that it has."""
    for argument, members in cases.items():
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, members, ids=[member.label for member in members])


def skip_exempt(case: MethodCase | ReducerCase, law: Law) -> None:
    """Skip a law that cannot hold for the case."""
    if law in case.exempt:
        pytest.skip(case.exempt[law])
