"""A parser of received bytes as the fuzzer sees it: valid inputs, a call, and the errors that it declares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.fuzz.mutation import Seed


@dataclass(frozen=True, slots=True)
class Parser:
    """One parser. An exception of another type than `refusals` is a failure."""

    name: str
    seeds: Sequence[Seed]
    """Valid inputs; each passes without an exception."""
    call: Callable[[bytes], object]
    refusals: tuple[type[Exception], ...] = ()
    weight: float = 1.0
    """Its share of all inputs, relative to the others'."""
