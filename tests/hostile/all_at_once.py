"""All attacks at once, each in its own process, during a sequence of honest runs.

    python -m tests.hostile --seconds 120

The usual memory and time are measured first, by honest runs without attacks in the same coordinator. Then all attacks
begin before the next honest run, and end after the last. They run with the lowest priority: in the field they have
processors of their own, and here they share two with everybody.
"""

from __future__ import annotations

import pkgutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from tests.hostile.assigned import begin_run_of
from tests.hostile.attacker import Attacker
from tests.hostile.federation import Federation, Memory
from tests.hostile.target import for_seconds, target

ATTACKS = Path(__file__).parent / "attacks"
USUAL_RUNS = 3
ASSIGNED = {"query_storm": "broad", "refetch": "frozen", "unread_bytes": "frozen", "unread_fetches": "frozen"}
"""Attack that needs its own assignment -> model of the run that gives it one."""
OPERATORS = frozenset({"operator"})
"""Attacks with an operator's certificate."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Measurements of the coordinator and its honest runs."""

    runs: int
    run_s: float
    """Median of the honest runs' wall time, in seconds."""
    longest_run_s: float
    peak_mib: float
    """Resident memory of the coordinator."""


@dataclass(slots=True)
class Result:
    """Before the attacks and during them."""

    usual: Seen
    attacked: Seen
    same_bits: bool
    attacks: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Failed attack programs with the end of their output; they prove nothing."""

    def as_json(self) -> dict[str, Any]:
        """The result as printed and as in docs/measurements/benchmarks.md."""
        ratios = {
            "memory_ratio": round(self.attacked.peak_mib / self.usual.peak_mib, 2),
            "time_ratio": round(self.attacked.run_s / self.usual.run_s, 2),
        }
        return {**asdict(self), **ratios}


def names() -> list[str]:
    """All attacks, by the names of their modules."""
    return sorted(module.name for module in pkgutil.iter_modules([str(ATTACKS)]))


def play(federation: Federation, seconds: float, attacks: Sequence[str]) -> Result:
    """Measure without attacks, then attack for this many seconds and measure again."""
    memory = Memory(federation.server.pid)
    undisturbed = federation.server.digests(federation.begin_run())
    memory.forget_peak()
    usual, bits = _observe(federation, memory, [undisturbed] * USUAL_RUNS, for_seconds(0.0))
    attackers = {name: _begin(federation, name) for name in attacks}
    try:
        memory.forget_peak()
        attacked, bits_under = _observe(federation, memory, [undisturbed], for_seconds(seconds))
    finally:
        for attacker in attackers.values():
            attacker.ask_to_end()
    failures = {name: attacker.failure() for name, attacker in attackers.items()}
    failed = {name: failure for name, failure in failures.items() if failure}
    return Result(usual, attacked, bits and bits_under, list(attacks), failed)


def _observe(federation: Federation, memory: Memory, expected: Sequence[list[str]], over: Any) -> tuple[Seen, bool]:
    """Execute honest runs one after the other: at least the expected number, and until the time is over."""
    times: list[float] = []
    same = True
    while len(times) < len(expected) or not over():
        began = time.monotonic()
        digests = federation.server.digests(federation.begin_run())
        times.append(time.monotonic() - began)
        same = same and digests == expected[0]
    return Seen(len(times), round(median(times), 3), round(max(times), 3), round(memory.peak(), 1)), same


def _begin(federation: Federation, name: str) -> Attacker:
    who = f"mallory-{name.replace('_', '-')}"
    if name in ASSIGNED:
        begin_run_of(federation, who, ASSIGNED[name])
    at = target(federation, who)
    if name in OPERATORS:
        at = replace(at, certificates=federation.hostile(who, "admin"))
    return Attacker(name, at, federation.workspace.folder / f"attack-{name}.out")
