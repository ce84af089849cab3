"""Measures a round without training here, in Flower and in NVIDIA FLARE, in turn, in one sitting.

    python -m benchmarks.rivals                                      # 10 clients, 44.7 MB, 5 rounds, three times
    python -m benchmarks.rivals --repeats 1 --rounds 2 --only flare

Every system runs as real processes on loopback with its default settings: a server and clients, each with one thread
of torch and one heap. The connections have mTLS where the system has it: here and in FLARE. Flower has TLS with the
server's certificate, and its nodes sign requests. No client trains: each adds a constant to every parameter, and a
wrong model is an error. Prints a JSON line for each run, then one with the medians and the rows of the table.
The others are installed into virtual environments under --environments, which needs a package index.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.demo_grid import machine
from benchmarks.environments import NotInstalled
from benchmarks.rivals import flare, flower, impetus
from benchmarks.rivals.contest import Case, Failed, Measured, Start, measure
from benchmarks.table import markdown

SYSTEMS: dict[str, Start] = {"impetus": impetus.start, "flare": flare.start, "flower": flower.start}
NAMES = {
    "impetus": "Impetus, mTLS",
    "flare": f"NVIDIA FLARE {flare.REQUIREMENTS[0].split('==')[1]}, mTLS",
    "flower": f"Flower {flower.REQUIREMENTS[0].split('==')[1]}, TLS",
}


def summary(runs: Mapping[str, Sequence[Measured]]) -> dict[str, dict[str, float]]:
    """Medians over the runs of each system."""
    fields = ("round_s_median", "server_cpu_s", "server_peak_mb")
    return {
        name: {field: statistics.median(asdict(one)[field] for one in measured) for field in fields}
        for name, measured in runs.items()
    }


def table(runs: Mapping[str, Sequence[Measured]]) -> list[str]:
    """A row for each system: medians, and in brackets the range of the runs' median rounds."""
    rows = []
    for name, found in summary(runs).items():
        rounds = [one.round_s_median for one in runs[name]]
        rows.append(
            {
                "": NAMES[name],
                "a round": f"{found['round_s_median']:.2f} s ({min(rounds):.2f} to {max(rounds):.2f})",
                "server CPU a round": f"{found['server_cpu_s']:.2f} s",
                "server memory, peak": f"{found['server_peak_mb']:,.0f} MB",
            }
        )
    return markdown(rows)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A round without training here, in Flower and in NVIDIA FLARE.")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--params", type=int, default=11_173_962)
    parser.add_argument("--tensors", type=int, default=62)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds; one more runs before them")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each system, in turn")
    parser.add_argument("--only", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="time limit of a run")
    parser.add_argument("--environments", type=Path, default=Path("build") / "rivals", metavar="DIR")
    options = parser.parse_args(arguments)
    if min(options.clients, options.params, options.tensors, options.rounds, options.repeats) < 1:
        parser.error("expected 1 or more of clients, parameters, tensors, rounds and repetitions")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = _options(arguments)
    case = Case(options.clients, options.params, options.tensors, options.rounds, options.limit)
    facts: dict[str, Any] = {**asdict(case), "date": datetime.now(UTC).date().isoformat(), "load": os.getloadavg()[0]}
    print(json.dumps({**facts, "machine": machine()}), flush=True)
    runs: dict[str, list[Measured]] = defaultdict(list)
    for repeat in range(options.repeats):
        for name in options.only:
            with tempfile.TemporaryDirectory(prefix=f"rivals-{name}-") as folder:
                try:
                    measured = measure(SYSTEMS[name], case, Path(folder), options.environments.resolve())
                except (Failed, NotInstalled) as error:
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
                    continue
            runs[name].append(measured)
            print(json.dumps({"system": name, "repeat": repeat, **asdict(measured)}), flush=True)
    print(json.dumps({"medians": summary(runs)}))
    print("\n".join(table(runs)))
    if missing := [name for name in options.only if len(runs[name]) < options.repeats]:
        raise SystemExit(f"not all runs of: {', '.join(missing)}")


if __name__ == "__main__":
    main()
