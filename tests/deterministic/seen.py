"""What a life has shown, for its checks and its log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.deterministic.loop import Process


class Violated(AssertionError):
    """An invariant does not hold."""


@dataclass
class Seen:
    """What a life has shown, for the checks at its end."""

    acknowledged: dict[tuple[str, int, int], list[bytes]] = field(default_factory=dict)
    """(client, round, exchange) -> digests of the updates with an admitted receipt, in order."""
    refused: dict[tuple[str, int, int], list[bytes]] = field(default_factory=dict)
    """The same of the updates with another receipt."""
    had_run: set[Process] = field(default_factory=set)
    """The coordinator's processes that had the run before its end."""
    commits: dict[int, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    restarts: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    effects: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    """The log, if it is kept."""

    def note(self, now: float, text: str) -> None:
        """A line of the log."""
        self.lines.append(f"{now:9.3f} {text}")
