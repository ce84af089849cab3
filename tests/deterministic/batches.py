"""Many lives, one after the other or in several processes, and their sum."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from fl_ops.worker_process import end_with_parent

SIZES = {1: 100, 2: 4}
"""Lives of one batch by depth: a second or more."""
_DIGESTS = 1 << 64


@dataclass
class Batch:
    """Lives with seeds in a row, or the sum of several batches."""

    depth: int
    lives: int = 0
    processor_s: float = 0.0
    failed: dict[int, list[str]] = field(default_factory=dict)
    """Seed -> lines about the failure: the command that repeats it, what was violated, the fewest faults."""
    happened: Counter[str] = field(default_factory=Counter)
    """Faults by kind."""
    digest: int = 0
    """Sum of the digests of what happened in each life, so that the order of the lives does not matter."""

    def add(self, other: Batch) -> None:
        """Add the lives of another batch."""
        self.lives += other.lives
        self.processor_s += other.processor_s
        self.failed |= other.failed
        self.happened += other.happened
        self.digest = (self.digest + other.digest) % _DIGESTS

    @classmethod
    def of(cls, values: dict[str, Any]) -> Batch:
        """From the `values` of one."""
        failed = {int(seed): lines for seed, lines in values["failed"].items()}
        faults, digest = Counter(values["faults"]), int(values["digest"], 16)
        return cls(values["depth"], values["lives"], values["processor_seconds"], failed, faults, digest)

    def values(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "depth": self.depth, "lives": self.lives, "processor_seconds": round(self.processor_s, 2),
            "failed": self.failed, "faults": dict(sorted(self.happened.items())), "digest": f"{self.digest:016x}",
        }  # fmt: skip


@dataclass(frozen=True)
class _Lived:
    """One life."""

    failure: list[str]
    happened: Counter[str]
    digest: int


def _digest(happened: Any) -> int:
    return int.from_bytes(blake2b(repr(happened).encode(), digest_size=8).digest())


def live_batch(depth: int, seeds: range, *, log: bool = False) -> Batch:
    """Live these lives in this process. log: print what happens, with virtual times."""
    batch, began = Batch(depth), time.process_time()
    for seed in seeds:
        lived = (_core if depth == 1 else _whole)(seed, log=log)
        batch.add(Batch(depth, 1, 0.0, {seed: lived.failure} if lived.failure else {}, lived.happened, lived.digest))
    batch.processor_s = time.process_time() - began
    return batch


def batches(depth: int, parts: Iterator[range], processes: int, within_s: float) -> Iterator[tuple[range, Batch]]:
    """Live the lives in several processes; yields each batch as it ends. None begins after `within_s`.

    Raises BrokenProcessPool if a process ends: a life has crashed the interpreter.
    """
    ends = time.monotonic() + within_s
    # The lives import the product, and only after the clocks: nothing is loaded yet that a fork could break.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), end_with_parent) as pool:
        running: dict[Future[Batch], range] = {}
        while True:
            while len(running) < 2 * processes and time.monotonic() < ends and (part := next(parts, None)):
                running[pool.submit(live_batch, depth, part)] = part
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def _failure(depth: int, seed: int, what: str, few: str) -> list[str]:
    return [f"FAILED: python -m tests.deterministic --depth {depth} --seeds {seed} --log", f"    {what}", f"    {few}"]


def _whole(seed: int, *, log: bool) -> _Lived:
    """Live one life of depth 2."""
    from tests.deterministic.living import live  # noqa: PLC0415 - only in a process whose clocks are virtual
    from tests.deterministic.plan import plan_of  # noqa: PLC0415
    from tests.deterministic.shrinking import shrunk  # noqa: PLC0415

    plan = plan_of(seed)
    result = live(plan)
    if log:
        print("\n".join(result.seen.lines))  # noqa: T201 - the command's output
    failure: list[str] = []
    if result.error:
        few = shrunk(plan.faults, lambda faults: bool(live(replace(plan, faults=tuple(faults))).error))
        enough = f"{len(few)} of {len(plan.faults)} faults are enough: {'; '.join(map(str, few)) or 'none'}"
        what = f"{plan.job.name}, {len(plan.clients)} clients: {result.error}"
        failure = _failure(2, seed, what, enough)
    return _Lived(failure, result.seen.happened, _digest(result.seen.lines))


def _core(seed: int, *, log: bool) -> _Lived:
    """Live one life of depth 1."""
    from tests.deterministic.core_life import CoreLife, live_core  # noqa: PLC0415 - as above
    from tests.deterministic.shrinking import shrunk  # noqa: PLC0415

    error, happened = live_core(seed)
    if log:
        print(CoreLife(seed).policy, *happened, sep="\n")  # noqa: T201 - the command's output
    failure: list[str] = []
    if error:
        few = shrunk(happened, lambda faults: bool(live_core(seed, tuple(fault.step for fault in faults))[0]))
        enough = f"{len(few)} of {len(happened)} faults are enough: {'; '.join(map(str, few)) or 'none'}"
        failure = _failure(1, seed, error, enough)
    return _Lived(failure, Counter(fault.what for fault in happened), _digest((error, happened)))
