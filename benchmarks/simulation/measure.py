"""Runs a contender once and measures its rounds after the first, which also warms it up."""

from __future__ import annotations

import csv
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulation.contenders import Options, Start, Started, environment
from benchmarks.simulation.setting import COHORT
from benchmarks.simulation.usage import Usage

SAMPLE_S, MEMORY_S = 0.1, 0.5


class Failed(Exception):
    """A contender ended with an error; the message has its last lines."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. Rates are those of the rounds after the first, evaluations included."""

    clients_per_s: float
    rounds_per_min: float
    cpu_ms_per_client: float
    """Processor time of all processes, per client. Unlike rates it hardly depends on other load on the machine."""
    start_s: float
    """From the start of the process to the end of the first round, less the duration of a later round."""
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
                if len(_rows(started.table)) > len(marks):
                    marks.append((now - began, usage.cpu_s))
        finally:
            usage.end()
            process.wait()
    rows = _rows(started.table)
    if process.returncode or len(rows) != options.rounds:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise Failed(f"exit code {process.returncode} after {len(rows)} of {options.rounds} rounds:\n{tail}")
    return _summary(rows, marks, usage)


def _summary(rows: list[dict[str, str]], marks: list[tuple[float, float]], usage: Usage) -> Measured:
    seconds = [float(row["seconds"]) for row in rows[1:]]
    (first_at, first_cpu), (_, last_cpu) = marks[0], marks[-1]
    clients = COHORT * len(seconds)
    return Measured(
        clients_per_s=clients / sum(seconds),
        rounds_per_min=60 * len(seconds) / sum(seconds),
        cpu_ms_per_client=1000 * (last_cpu - first_cpu) / clients,
        start_s=first_at - min(seconds),
        peak_bytes=usage.peak_bytes,
        accuracy=float(rows[-1]["accuracy"]),
    )


def _rows(table: Path) -> list[dict[str, str]]:
    """The rounds so far; none before the file exists."""
    try:
        with table.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except FileNotFoundError:
        return []
