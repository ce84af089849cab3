"""Reports a peer's rounds to the benchmark, as the first columns of `rounds.csv` that `fl simulate` writes."""

from __future__ import annotations

import csv
import time
from pathlib import Path

from benchmarks.simulation import setting


class Rounds:
    """Writes a line when a round has ended. `seconds` is the time since the round before, or since `begin`."""

    def __init__(self, path: Path, count: int) -> None:
        self._path, self._count = path, count
        self._lines: list[dict[str, float | int | str]] = []
        self._at = time.monotonic()

    def begin(self) -> None:
        """The first round begins now."""
        self._at = time.monotonic()

    def evaluates(self, number: int) -> bool:
        """Whether an evaluation follows the round, counted from 0: every tenth, and the last one."""
        return (number + 1) % setting.EVALUATION_EVERY == 0 or number + 1 == self._count

    def ended(self, number: int, accuracy: float | None) -> None:
        """A round has ended, with its evaluation. Only this process and the benchmark use the file."""
        now = time.monotonic()
        self._lines.append(
            {"round": number, "accuracy": "" if accuracy is None else accuracy, "seconds": now - self._at}
        )
        self._at = now
        part = self._path.with_suffix(".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, self._lines[0].keys())
            table.writeheader()
            table.writerows(self._lines)
        part.replace(self._path)
