"""`python -m tests.deterministic --depth 2 --seeds 0:100`: live the lives of these seeds, and check each.

A life that fails prints the command that repeats it, what was violated, and the fewest of its faults that are enough.
The exit status is the number of failed lives, 99 at most.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import replace

from tests.deterministic import clocks

HASH_SEED = "0"
"""Sets of texts have one order in every process."""


def main() -> int:
    """Run the command. Times are of the processor."""
    clocks.require_first()
    parser = argparse.ArgumentParser(prog="python -m tests.deterministic", description=__doc__)
    parser.add_argument("--depth", type=int, choices=(1, 2), default=2, help="1: the core; 2: the whole system")
    parser.add_argument("--seeds", default="0:50", help="first:end, or one seed")
    parser.add_argument("--log", action="store_true", help="print what happens, with virtual times")
    options = parser.parse_args()
    first, _, end = options.seeds.partition(":")
    seeds = range(int(first), int(end) if end else int(first) + 1)
    began, failed, happened = time.process_time(), 0, Counter[str]()
    for seed in seeds:
        lines, kinds = (_core if options.depth == 1 else _whole)(seed, log=options.log)
        happened += kinds
        failed += bool(lines)
        for line in lines:
            print(line, flush=True)
        if (seed + 1) % 100 == 0:
            print(f"up to seed {seed}: {failed} failed", file=sys.stderr, flush=True)
    seconds = time.process_time() - began
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(happened.items()))
    print(
        f"{len(seeds)} lives of depth {options.depth} in {seconds:.0f} s of processor time, {failed} failed: {faults}"
    )
    return min(failed, 99)


def _whole(seed: int, *, log: bool) -> tuple[list[str], Counter[str]]:
    """Live one life of depth 2. Returns the lines about its failure, none if all is well, and its faults by kind."""
    from tests.deterministic.life import live
    from tests.deterministic.plan import plan_of
    from tests.deterministic.shrinking import shrunk

    plan = plan_of(seed)
    result = live(plan)
    if log:
        print("\n".join(result.seen.lines))
    if not result.error:
        return [], result.seen.happened
    few = shrunk(plan.faults, lambda faults: bool(live(replace(plan, faults=tuple(faults))).error))
    return [
        f"FAILED: python -m tests.deterministic --depth 2 --seeds {seed} --log",
        f"    {plan.job.name}, {len(plan.clients)} clients: {result.error}",
        f"    {len(few)} of {len(plan.faults)} faults are enough: {'; '.join(map(str, few)) or 'none'}",
    ], result.seen.happened


def _core(seed: int, *, log: bool) -> tuple[list[str], Counter[str]]:
    """The same for a life of depth 1."""
    from tests.deterministic.core_life import CoreLife, live_core
    from tests.deterministic.shrinking import shrunk

    error, happened = live_core(seed)
    kinds = Counter(fault.what for fault in happened)
    if log:
        print(CoreLife(seed).policy, *happened, sep="\n")
    if not error:
        return [], kinds
    few = shrunk(happened, lambda faults: bool(live_core(seed, tuple(fault.step for fault in faults))[0]))
    return [
        f"FAILED: python -m tests.deterministic --depth 1 --seeds {seed} --log",
        f"    {error}",
        f"    {len(few)} of {len(happened)} faults are enough: {'; '.join(map(str, few)) or 'none'}",
    ], kinds


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        os.execv(  # noqa: S606 - this program again
            sys.executable, [sys.executable, "-m", "tests.deterministic", *sys.argv[1:]]
        )
    code = main()
    sys.stdout.flush()
    os._exit(code)  # killed lives leave objects half-way: Python's own end over them once ended with signal 11
