"""The clocks of the `time` module, which show virtual time while a life is lived, and else the machine's.

Import it before the product: defaults of its arguments keep the functions that they find.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_REAL: dict[str, Callable[..., float]] = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter")}
VIRTUAL: dict[str, Callable[[], float]] = {}
"""Clocks of the life under way, by name; empty between lives."""


def _clock(name: str) -> Callable[[], float]:
    def read() -> float:
        return VIRTUAL.get(name, _REAL[name])()

    return read


def _sleep(seconds: float) -> None:
    if not VIRTUAL:
        _SLEEP(seconds)


_SLEEP = time.sleep

_EARLY = sorted(name for name in sys.modules if name.partition(".")[0] in ("fl_server", "fl_client"))


def require_first() -> None:
    """Raise RuntimeError in a process that loaded the product before."""
    if _EARLY:
        raise RuntimeError(f"expected `python -m tests.deterministic`, got a process with {_EARLY[0]} loaded already")


for _name in _REAL:
    setattr(time, _name, _clock(_name))
time.sleep = _sleep  # type: ignore[assignment]  # it takes the same numbers
