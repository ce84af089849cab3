"""Runs a contender once and measures its rounds after the first, which also warms it up.

A run may be too short to have every tenth round evaluated as the setting has it, and the last round always is. So the
time of a round is that of a round without an evaluation, and a tenth of what an evaluation adds.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.simulation.contenders import Options, Start, Started, environment
from benchmarks.simulation.setting import COHORT, EVALUATION_EVERY
from benchmarks.usage import Usage

SAMPLE_S, MEMORY_S = 0.1, 0.5


class Failed(Exception):
    """A contender ended with an error; the message has its last lines."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    clients_per_s: float
    rounds_per_min: float
    cpu_ms_per_client: float
    """Processor time of all processes, per client. Unlike rates it hardly depends on other load on the machine."""
    start_s: float
    """From the start of the process to the first round."""
    peak_bytes: int
    accuracy: float
    """After the last round."""


def measure(start: Start, options: Options, limit_s: float) -> Measured:
    """Run a contender in a folder of its own. Raises Failed and NotInstalled."""
    with tempfile.TemporaryDirectory(prefix="fl-simulation-") as folder:
        started = start(options, Path(folder))
        return _watch(started, Path(folder) / "output.log", options, limit_s)


def _watch(started: Started, log: Path, options: Options, limit_s: float) -> Measured:
    began, marks = time.monotonic(), list[tuple[float, float]]()
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            started.command, stdout=output, stderr=output, cwd=started.path, env=environment(started)
        )
        usage, sampled = Usage(process.pid), 0.0
        try:
            while process.poll() is None:
                time.sleep(SAMPLE_S)
                now = time.monotonic()
                if now - began > limit_s:
                    raise Failed(f"not done after {limit_s:.0f} s")
                usage.sample(memory=now - sampled > MEMORY_S)
                sampled = now if now - sampled > MEMORY_S else sampled
                marks += [(now - began, usage.cpu_s)] * (len(_rows(started.table)) - len(marks))
        finally:
            usage.end()
            process.wait()
        marks += [(time.monotonic() - began, usage.cpu_s)] * (options.rounds - len(marks))
    rows = _rows(started.table)
    if process.returncode or len(rows) != options.rounds:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-50:])
        raise Failed(f"exit code {process.returncode} after {len(rows)} of {options.rounds} rounds:\n{tail}")
    return _summary(rows, marks, usage)


def _summary(rows: list[dict[str, str]], marks: list[tuple[float, float]], usage: Usage) -> Measured:
    evaluated = [bool(row["accuracy"]) for row in rows[1:]]
    seconds = _of_a_round([float(row["seconds"]) for row in rows[1:]], evaluated)
    cpu_s = _of_a_round([after - before for (_, before), (_, after) in pairwise(marks)], evaluated)
    return Measured(
        clients_per_s=COHORT / seconds,
        rounds_per_min=60 / seconds,
        cpu_ms_per_client=1000 * cpu_s / COHORT,
        start_s=marks[0][0] - float(rows[0]["seconds"]),
        peak_bytes=usage.peak_bytes,
        accuracy=float(rows[-1]["accuracy"]),
    )


def _of_a_round(values: Sequence[float], evaluated: Sequence[bool]) -> float:
    """The mean of rounds without an evaluation, and of what an evaluation adds its share of one round."""
    without = statistics.mean(value for value, with_one in zip(values, evaluated, strict=True) if not with_one)
    whole = statistics.mean(value for value, with_one in zip(values, evaluated, strict=True) if with_one)
    return without + (whole - without) / EVALUATION_EVERY


def _rows(table: Path) -> list[dict[str, str]]:
    """The rounds so far; none before the file exists."""
    try:
        with table.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []
