"""Whether the measurements of a soak show a leak: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import linear_regression, median

from tests.soak.resources import Resources, Sample

RSS_SHARE, RSS_MB = 0.02, 4.0
"""Resident memory at the end may exceed that of the middle by this share and this many megabytes."""
LOG_MB = 16.0
"""The ledger's log is written back at 4 MB; a transaction may be long."""
THREADS = 4
"""The size of grpc's own thread pool varies by a few."""
BEST = 1
"""Checkpoints in addition to the latest ones: the best one."""
WINDOW = 3
"""Number of samples in the medians of the start, the middle and the end."""


@dataclass
class Observed:
    """The measurements of a soak."""

    base: Sample
    """Before the soak, after the first wave of daemons had stopped."""
    samples: Sequence[Sample]
    """The coordinator since the end of the warm-up."""
    steady: Sequence[Resources]
    """The daemon that ran all the time, also since the end of the warm-up."""
    after: Sample
    """After the last daemon's exit and the end of all runs."""
    checkpoints: Mapping[str, int]
    """Run -> number of its remaining checkpoints."""
    keep: int
    spool: Sequence[str] = ()
    """Remaining paths in the spool."""
    faults: Sequence[str] = field(default_factory=list)
    """Other errors during the soak."""


def over_time(values: Sequence[float]) -> tuple[float, float, float]:
    """(start, middle, end), each the median of a few adjacent samples."""
    at = max(0, len(values) // 2 - WINDOW // 2)
    parts = values[:WINDOW], values[at : at + WINDOW], values[-WINDOW:]
    return median(parts[0]), median(parts[1]), median(parts[2])


def slope_mb_per_hour(held: Sequence[Resources]) -> float:
    """Slope of resident memory over the second half, by least squares; 0 with too few samples."""
    half = held[len(held) // 2 :]
    if len(half) < 2:
        return 0.0
    return linear_regression([each.at_s for each in half], [each.rss_mb for each in half]).slope * 3600


def allowed_mb(middle: float) -> float:
    """The most resident memory at the end."""
    return middle * (1 + RSS_SHARE) + RSS_MB


def faults(seen: Observed) -> list[str]:
    """A message for every leak."""
    return [
        *seen.faults,
        *_memory("the coordinator", [sample.held for sample in seen.samples]),
        *_memory("the steady daemon", seen.steady),
        *_steady(seen.steady),
        *_back_at_base(seen.base, seen.after),
        *_left_on_disk(seen),
    ]


def _memory(who: str, held: Sequence[Resources]) -> list[str]:
    if len(held) < 2 * WINDOW:
        return [f"{who}: expected {2 * WINDOW} samples or more after the warm-up, got {len(held)}: soak for longer"]
    _, middle, end = over_time([each.rss_mb for each in held])
    if end <= allowed_mb(middle):
        return []
    return [f"{who}: {end:.1f} MB resident at the end, {middle:.1f} MB in the middle: over {allowed_mb(middle):.1f} MB"]


def _steady(held: Sequence[Resources]) -> list[str]:
    """The steady daemon reaches its maxima in the first half already, apart from work under way."""
    half = len(held) // 2
    found = []
    for name in ("files", "sockets", "others", "threads", "state_files"):
        values = [getattr(each, name) for each in held]
        if half and max(values[half:]) > max(values[:half]) + 2:
            found.append(f"the steady daemon: {name} grew from {max(values[:half])} to {max(values[half:])}")
    return found


def _back_at_base(base: Sample, after: Sample) -> list[str]:
    """Without clients the coordinator has no more resources than before the first one."""
    return [
        f"the coordinator: {now} {what} without clients at the end, {before} at the start"
        for what, before, now, more in compared(base, after)
        if now > before + more
    ]


def compared(base: Sample, after: Sample) -> list[tuple[str, int, int, int]]:
    """(name, number before, number after, allowed increase)."""
    return [
        ("open files", base.held.files, after.held.files, 0),
        ("sockets", base.held.sockets, after.held.sockets, 0),
        ("other descriptors", base.held.others, after.held.others, 0),
        ("threads", base.held.threads, after.held.threads, THREADS),
        ("tasks", base.tasks, after.tasks, 0),
        ("sessions", 0, after.sessions, 0),
        ("attached clients", 0, after.present, 0),
    ]


def _left_on_disk(seen: Observed) -> list[str]:
    found = [f"{count} checkpoints of {run}, {seen.keep} to be kept" for run, count in _too_many(seen)]
    if seen.spool:
        found.append(f"{len(seen.spool)} left in the spool, first {seen.spool[0]}")
    if (log := max(sample.disk_mb["log"] for sample in (*seen.samples, seen.after))) > LOG_MB:
        found.append(f"the ledger's log had {log:.1f} MB, over {LOG_MB:g}")
    return found


def _too_many(seen: Observed) -> list[tuple[str, int]]:
    return [(run, count) for run, count in seen.checkpoints.items() if count > seen.keep + BEST]
