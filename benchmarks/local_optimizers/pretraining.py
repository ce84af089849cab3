"""DiLoCo against AdamW with the same tokens: a transformer of a million parameters on tiny Shakespeare.

Eight workers with a share of the text each make 400 steps of 8 sequences and exchange the model every 20 or 100 steps.
AdamW makes 400 steps of 64 sequences on the whole text: one client whose optimizer and data go on over the rounds. All
have one cosine schedule with warm-up, and the same clip. The learning rate is chosen on another seed than the others.

    python -m benchmarks.local_optimizers.pretraining --data-root DIR [--seeds 1 2 3] [--out FILE]

It prints a line of JSON a run: held-out loss, bytes up and down of one worker, seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from fl_ops.simulate.output.results import SeedResult
from fl_ops.simulate.seeds import Job, Report, simulate
from fl_ops.simulate.settings import parse_simulation

STEPS, WORKERS, BATCH = 400, 8, 8
RATES = [0.001, 0.002, 0.004, 0.008]
SMALL = {"update": "eden4", "model": "int8", "difference": "previous"}
CASES: dict[str, dict[str, Any]] = {
    "AdamW": {"workers": 1, "steps": 100},
    "AdamW, one worker's batches": {"workers": 1, "steps": 100, "batch": BATCH},
    "DiLoCo, H = 20": {"workers": WORKERS, "steps": 20},
    "DiLoCo, H = 20, eden4 up, int8 differences down": {"workers": WORKERS, "steps": 20, "encodings": SMALL},
    "DiLoCo, H = 20, int4 up": {"workers": WORKERS, "steps": 20, "encodings": {"update": "int4"}},
    "DiLoCo, H = 100": {"workers": WORKERS, "steps": 100},
    "DiLoCo, H = 100, eden4 up, int8 differences down": {"workers": WORKERS, "steps": 100, "encodings": SMALL},
}


def run_of(case: dict[str, Any], rate: float, data_root: str) -> dict[str, Any]:
    """The file of `fl simulate` for a case."""
    alone = case["workers"] == 1
    adamw = {"optimizer": {"name": "adamw", "parameters": {}, "state": "device"}, "continue_data": True}
    return {
        "task": {"name": "shakespeare", "options": {"width": 160, "least_characters": 1}},
        "algorithm": {"name": "fedavg" if alone else "diloco"},
        "local": {
            "learning_rate": rate,
            "steps": case["steps"],
            "batch_size": case.get("batch", BATCH * WORKERS // case["workers"]),
            "max_gradient_norm": 1.0,
            "schedule": {"kind": "cosine", "warmup": 0.05, "end": 0.1, "over": "run"},
            **(adamw if alone else {}),
        },
        "round": {"clients_per_round": case["workers"]},
        "evaluation": {"every": STEPS // case["steps"]},
        "stop": {"rounds": STEPS // case["steps"]},
        "encodings": case.get("encodings", {}),
        "simulation": {
            "clients": case["workers"],
            "partition": {"method": "iid"},
            "task_options": {"data_root": data_root},
        },
    }


def measured(name: str, rate: float, seed: int, data_root: str) -> dict[str, Any]:
    """One run's row. Raises RuntimeError if the run fails."""
    reports: list[Report] = []
    started = time.monotonic()
    simulate(Job(parse_simulation(run_of(CASES[name], rate, data_root)), seed, None), reports.append)
    result = reports[-1]
    if not isinstance(result, SeedResult):
        raise RuntimeError(f"expected a result, got {result}")
    workers = CASES[name]["workers"]
    return {
        "case": name,
        "rate": rate,
        "seed": seed,
        "loss": result.rounds[-1].metrics["loss"],
        "accuracy": result.rounds[-1].metrics["accuracy"],
        "bytes_up": sum(row.bytes_up for row in result.rounds) // workers,
        "bytes_down": sum(row.bytes_down for row in result.rounds) // workers,
        "seconds": round(time.monotonic() - started, 1),
    }


def rows(
    cases: Sequence[str], seeds: Sequence[int], rates: Sequence[float], data_root: str
) -> Iterator[dict[str, Any]]:
    """The search of each rate on seed 0 without encodings, and the rows of the seeds with the best one."""
    best: dict[str, float] = {}
    for name in cases:
        group = name if CASES[name]["workers"] == 1 else f"H = {CASES[name]['steps']}"
        if group not in best:
            search = [measured(name, rate, 0, data_root) for rate in rates]
            yield from ({**row, "search": True} for row in search)
            best[group] = min(search, key=lambda row: row["loss"])["rate"]
        for seed in seeds:
            yield measured(name, best[group], seed, data_root)


def main() -> None:
    """Read the options, and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", required=True, help="folder above tinyshakespeare/input.txt")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, help="file for the rows; by default they are printed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    into: TextIO = options.out.open("a") if options.out else sys.stdout
    for row in rows(options.cases, options.seeds, options.rates, options.data_root):
        print(json.dumps(row), file=into, flush=True)


if __name__ == "__main__":
    main()
