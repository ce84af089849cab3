"""The package as a whole: its example runs and its names are listed."""

from __future__ import annotations

import doctest
from types import ModuleType

import algorithms


def test_example_of_the_package_runs() -> None:
    """The docstring's round of FedCM gives the numbers that it prints."""
    results = doctest.testmod(algorithms)
    assert results.attempted > 0
    assert results.failed == 0


def test_public_names_are_exactly_the_listed_ones() -> None:
    """`__all__` has every public name but submodules, in order, and nothing else."""
    public = {name for name, value in vars(algorithms).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert public == set(algorithms.__all__)
    assert len(algorithms.__all__) == len(set(algorithms.__all__))
