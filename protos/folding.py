"""Lines of one kind that come again and again: the first few of a window are written, the others counted.

There is no clock here: time is an argument, in seconds of any clock that does not jump.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(slots=True)
class _Window(Generic[T]):
    began: float
    last: T
    lines: int = 0
    folded: int = 0


@dataclass(frozen=True, slots=True)
class Folded(Generic[T]):
    """Lines that were not written."""

    last: T
    """The latest of them."""
    count: int


class Folding(Generic[K, T]):
    """Windows of many kinds of lines. Not for several threads at once."""

    def __init__(self, most: int, window_s: float, kinds: int = 4096) -> None:
        """most: lines of a kind that are written in a window; 0: all. kinds: that are told apart at once."""
        self._most, self._window_s, self._kinds = most, window_s, kinds
        self._windows: OrderedDict[K, _Window[T]] = OrderedDict()
        """The one that began first is first."""

    def __len__(self) -> int:
        return len(self._windows)

    def passes(self, kind: K, line: T, now: float) -> bool:
        """Whether the line is to be written. Ask `over` before: it has what an ended window of the kind folded."""
        if not self._most:
            return True
        window = self._windows.get(kind)
        if window is None:
            window = self._windows[kind] = _Window(now, line)
        window.lines += 1
        if window.lines <= self._most:
            return True
        window.last, window.folded = line, window.folded + 1
        return False

    def over(self, now: float) -> list[Folded[T]]:
        """What was folded in windows that have ended, once for each. The oldest go early when there are too many."""
        found = []
        while self._windows:
            kind, window = next(iter(self._windows.items()))
            if now - window.began < self._window_s and len(self._windows) < self._kinds:
                break
            del self._windows[kind]
            if window.folded:
                found.append(Folded(window.last, window.folded))
        return found

    def next_end(self, now: float) -> float | None:
        """Seconds until a window ends; None while there is none."""
        first = next(iter(self._windows.values()), None)
        return None if first is None else max(0.0, first.began + self._window_s - now)

    def forget(self, kind: K) -> None:
        """The next line of this kind is the first."""
        self._windows.pop(kind, None)
