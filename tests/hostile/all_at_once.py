"""All attacks at once, each in its own process, during a sequence of honest runs.

    python -m tests.hostile --seconds 120

The usual memory and time are measured first, by honest runs without attacks in the same coordinator. The attackers run
with the lowest priority: in the field they have processors of their own, and here they share two with everybody.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from fl_ops.admin.settings import Certificates
from tests.hostile.assigned import begin_run_of
from tests.hostile.federation import Federation, Memory
from tests.hostile.target import Target, for_seconds, target
from tests.processes.process import ROOT

ATTACKS = Path(__file__).parent / "attacks"
USUAL_RUNS = 3
ASSIGNED = {"query_storm": "broad", "refetch": "frozen", "unread_fetches": "frozen"}
"""Attack that needs its own assignment -> model of the run that gives it one."""
OPERATORS = frozenset({"operator"})
"""Attacks with an operator's certificate."""
LOWEST_PRIORITY = 19
ENDING_S = 30.0
"""Time for an attack to close its connections."""


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
    failed: dict[str, str] = {}
    with ExitStack() as open_attacks:
        for name in attacks:
            open_attacks.enter_context(_attacking(federation, name, seconds, failed))
        memory.forget_peak()
        attacked, bits_under = _observe(federation, memory, [undisturbed], for_seconds(seconds))
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


@contextmanager
def _attacking(federation: Federation, name: str, seconds: float, failed: dict[str, str]) -> Iterator[None]:
    """Run one attack in its own process for the block; it is killed if it does not end by itself."""
    who = f"mallory-{name.replace('_', '-')}"
    if name in ASSIGNED:
        begin_run_of(federation, who, ASSIGNED[name])
    at = target(federation, who)
    if name in OPERATORS:
        at = replace(at, certificates=federation.hostile(who, "admin"))
    what = asdict(at)
    order = json.dumps({**what, "certificates": {key: str(path) for key, path in what["certificates"].items()}})
    out = federation.workspace.folder / f"attack-{name}.out"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, "-m", "tests.hostile.attacker", name, str(seconds), order]
    with out.open("wb") as output:
        process = subprocess.Popen(whole, env=environment, stdout=output, stderr=output)
    try:
        yield
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        failed[name] = "it did not end"
    finally:
        if process.poll() is None:
            process.kill()
        if process.wait() and name not in failed:
            failed[name] = out.read_text(errors="replace")[-500:]


def attack(name: str, seconds: float, order: dict[str, Any]) -> None:
    """The attacker's process."""
    os.nice(LOWEST_PRIORITY)
    files = {key: Path(path) for key, path in order.pop("certificates").items()}
    module = importlib.import_module(f"tests.hostile.attacks.{name}")
    module.attack(Target(**order, certificates=Certificates(**files)), for_seconds(seconds))
