"""All attacks at once, each as a process of its own, while honest runs follow each other.

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

from fl_ops.settings import Certificates
from tests.hostile.assigned import begin_run_of
from tests.hostile.federation import Federation, Memory
from tests.hostile.target import Target, for_seconds, target
from tests.integration.processes import ROOT

ATTACKS = Path(__file__).parent / "attacks"
USUAL_RUNS = 3
ASSIGNED = {"query_storm": "broad", "refetch": "frozen", "unread_fetches": "frozen"}
"""Attacks that need an assignment of their own, with the model of the run that gives them one."""
OPERATORS = frozenset({"operator"})
"""Attacks with an operator's certificate."""
LOWEST_PRIORITY = 19
ENDING_S = 30.0
"""For an attack to close its connections once its time is over."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the coordinator and its honest runs were like for a while."""

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
    """Attacks whose program failed, with the end of its output: then they proved nothing."""

    def as_json(self) -> dict[str, Any]:
        """As it is printed and kept in docs/benchmarks.md."""
        ratios = {
            "memory_ratio": round(self.attacked.peak_mib / self.usual.peak_mib, 2),
            "time_ratio": round(self.attacked.run_s / self.usual.run_s, 2),
        }
        return {**asdict(self), **ratios}


def names() -> list[str]:
    """All attacks, by the names of their modules."""
    return sorted(module.name for module in pkgutil.iter_modules([str(ATTACKS)]))


def play(federation: Federation, seconds: float, attacks: Sequence[str]) -> Result:
    """Measure what is usual, attack for so many seconds, and measure again."""
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
    """Honest runs one after the other: as many as expected, and more until it is over."""
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
    """One attack in a process of its own, which ends by itself; ended here if it does not."""
    who = f"mallory-{name.replace('_', '-')}"
    if name in ASSIGNED:
        begin_run_of(federation, who, ASSIGNED[name])
    at = target(federation, who)
    if name in OPERATORS:
        at = replace(at, certificates=federation.hostile(who, "admin"))
    what = asdict(at)
    order = json.dumps({**what, "certificates": {key: str(path) for key, path in what["certificates"].items()}})
    out = federation.place.folder / f"attack-{name}.out"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    whole = [sys.executable, "-m", "tests.hostile.all_at_once", name, str(seconds), order]
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


def _attack(name: str, seconds: float, order: dict[str, Any]) -> None:
    """The attacker's process."""
    os.nice(LOWEST_PRIORITY)
    files = {key: Path(path) for key, path in order.pop("certificates").items()}
    module = importlib.import_module(f"tests.hostile.attacks.{name}")
    module.attack(Target(**order, certificates=Certificates(**files)), for_seconds(seconds))


if __name__ == "__main__":
    _attack(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
