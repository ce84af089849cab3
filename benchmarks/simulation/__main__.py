"""Measures clients a second in the CIFAR-10 setting of pfl-research, here and with other libraries.

    python -m benchmarks.simulation                              # 100 rounds of each, three times: hours on two cores
    python -m benchmarks.simulation --rounds 3 --repeats 2 --only sequential "pfl, 1 process"

All contenders train the same model on the same clients, with one torch thread in each process that trains. They run one
after the other, and every second repetition in reverse order, so that slow changes of the machine's load affect all.
Prints a JSON line for each run, and the rows of the table in docs/measurements/benchmarks.md: medians. The libraries
are installed into virtual environments in build/, which needs a package index.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.demo_grid import machine
from benchmarks.environments import NotInstalled
from benchmarks.simulation.contenders import ROOT, Options, contenders
from benchmarks.simulation.measure import Failed, Measured, measure
from benchmarks.table import markdown


def table(runs: Mapping[str, Sequence[Measured]]) -> list[str]:
    """A row of medians for each contender, relative to the first."""
    first = next(iter(runs.values()))
    rows = []
    for name, ran in runs.items():
        middle = {field: statistics.median(asdict(one)[field] for one in ran) for field in asdict(ran[0])}
        ratio = statistics.median(one.clients_per_s / base.clients_per_s for one, base in zip(ran, first, strict=False))
        rows.append(
            {
                "contender": name,
                "clients a second": f"{middle['clients_per_s']:.2f}",
                "to the first row": f"{ratio:.2f}",
                "rounds a minute": f"{middle['rounds_per_min']:.2f}",
                "processor time a client": f"{middle['cpu_ms_per_client']:.0f} ms",
                "start": f"{middle['start_s']:.0f} s",
                "memory, peak": f"{middle['peak_bytes'] / 1e6:,.0f} MB",
                "accuracy": f"{middle['accuracy']:.4f}",
            }
        )
    return markdown(rows)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Clients a second of simulations: our engines and other libraries.")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of a run; the first is not counted")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each contender")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders; an unknown name lists all")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="of contenders that use several")
    parser.add_argument("--device", default="cpu", help="of the engine batched; others train on the CPU")
    parser.add_argument("--limit", type=float, default=7200, metavar="SECONDS", help="time limit of a run")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "simulation", metavar="DIR")
    options = parser.parse_args(arguments)
    if options.rounds < 3 or options.repeats < 1:
        parser.error("expected 3 rounds or more, since the first is not counted, and 1 repetition or more")
    known = contenders(options.device)
    if unknown := sorted(set(options.only or ()) - set(known)):
        parser.error(f"unknown contender {unknown[0]!r}; this version has: {', '.join(known)}")
    options.only = options.only or list(known)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = _options(arguments)
    chosen = {name: start for name, start in contenders(options.device).items() if name in options.only}
    how = Options(options.rounds, options.processes, options.device, options.environments)
    facts: dict[str, Any] = {"rounds": how.rounds, "processes": how.processes, "device": how.device}
    print(json.dumps({**facts, "machine": machine()}), flush=True)
    runs: dict[str, list[Measured]] = defaultdict(list)
    for repeat in range(options.repeats):
        for name in list(chosen)[:: -1 if repeat % 2 else 1]:
            try:
                measured = measure(chosen[name], how, options.limit)
            except (Failed, NotInstalled) as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                continue
            runs[name].append(measured)
            print(json.dumps({"contender": name, "repeat": repeat, **asdict(measured)}), flush=True)
    if runs:
        print("\n".join(table({name: runs[name] for name in chosen if name in runs})))
    if len(runs) < len(chosen):
        raise SystemExit(f"no result of: {', '.join(name for name in chosen if name not in runs)}")


if __name__ == "__main__":
    main()
