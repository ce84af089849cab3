"""Measures where the time of a simulated run goes, by parts of its rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Literal, TypeVar

Part = Literal["clients", "admission", "aggregation", "bundles", "evaluation", "evaluation on clients"]
PARTS: Mapping[Part, str] = {
    "clients": "waiting for clients' updates",
    "admission": "checks of updates",
    "aggregation": "sums and server step",
    "bundles": "packing of model and direction",
    "evaluation": "evaluation of the model",
    "evaluation on clients": "waiting for clients' evaluations",
}
OTHER = "other work of the rounds"

T = TypeVar("T")


class Profile:
    """Seconds of each part, in the process that executes the rounds."""

    def __init__(self) -> None:
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def part(self, part: Part) -> Iterator[None]:
        """Count the time of the context."""
        began = perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += perf_counter() - began

    def waiting(self, part: Part, results: Iterator[T]) -> Iterator[T]:
        """The same results; the time until each one comes is counted."""
        while True:
            with self.part(part):
                result = next(results, None)
            if result is None:
                return
            yield result

    def seconds(self, total: float) -> dict[str, float]:
        """Seconds by what they were used for, of a run that took `total` seconds."""
        known = {text: self._seconds[part] for part, text in PARTS.items()}
        return {**known, OTHER: max(0.0, total - sum(known.values()))}
