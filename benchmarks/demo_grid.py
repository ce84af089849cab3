"""The grid search for the demo's settings; it writes fl_ops/demo/grid.json.

    python -m benchmarks.demo_grid

Every algorithm is run with the same learning rates, FedCM with each of its alphas at each rate. Every cell is run with
several seeds; a seed decides the data partition, the first model, the cohorts and the batches. Accuracy is measured on
one in five of the TRAINING scans of each digit, which no client has; the 360 scans of the demo's evaluation are not
used. The best cell of each algorithm is then run with other seeds and all training scans, and evaluated on these 360
scans. This checks the choice and does not influence it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from fl_ops.demo.partitioning import METRIC
from fl_ops.demo.settings import BATCH_SIZE, DIRICHLET_ALPHA, EPOCHS, LAST, DemoSettings, Method
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation

TARGET = Path(__file__).parents[1] / "fl_ops" / "demo" / "grid.json"
LEARNING_RATES = (0.05, 0.1, 0.2, 0.3, 0.4)
PARAMETERS: dict[str, tuple[dict[str, float], ...]] = {
    "fedavg": ({},),
    "fedcm": ({"alpha": 0.1}, {"alpha": 0.2}, {"alpha": 0.3}),
}
SEEDS = tuple(range(101, 107))
CHECK_SEEDS = tuple(range(201, 221))
DEMO = DemoSettings()
VALIDATION_EVERY = 5
PROCESSES = 2
RULE = (
    f"the cell with the highest validation accuracy, mean of the last {LAST} rounds, averaged over the seeds; of "
    "equals the first"
)


@dataclass(frozen=True)
class Cell:
    """One setting of one algorithm."""

    algorithm: str
    learning_rate: float
    parameters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One run. validate: evaluate on validation scans, otherwise on the demo's held-out scans."""

    cell: Cell
    seed: int
    validate: bool


def run(job: Job) -> list[float]:
    """Accuracy after each round."""
    cell = job.cell
    method = Method(cell.algorithm, cell.learning_rate, cell.parameters, "its grid")
    simulation = {
        "clients": DEMO.clients, "names": "client-{index}",
        "partition": {"method": "dirichlet", "alpha": DIRICHLET_ALPHA},
        "validation_every": VALIDATION_EVERY if job.validate else 0,
    }  # fmt: skip
    prepared = prepare(parse_simulation({**DEMO.run(method), "simulation": simulation}), job.seed)
    with Simulation(prepared.config, prepared.clients, task=prepared.server_task) as simulated:
        return [done.metrics[METRIC] for done in simulated.rounds()]


def cells() -> list[Cell]:
    """The whole grid."""
    return [
        Cell(algorithm, rate, parameters)
        for algorithm, choices in PARAMETERS.items()
        for parameters in choices
        for rate in LEARNING_RATES
    ]


def measure(pool: ProcessPoolExecutor, cells: Iterable[Cell], seeds: tuple[int, ...], validate: bool) -> list[Any]:
    """Run each cell with all seeds. Returns mean and worst accuracy of the last rounds, by seed and on average."""
    rows = []
    for cell in cells:
        last = [accuracies[-LAST:] for accuracies in pool.map(run, [Job(cell, seed, validate) for seed in seeds])]
        means, worst = [round(fmean(values), 4) for values in last], [round(min(values), 4) for values in last]
        rows.append({**asdict(cell), "mean": round(fmean(means), 4), "mean_by_seed": means, "worst_by_seed": worst})
        print(cell, rows[-1]["mean"], means, worst, file=sys.stderr, flush=True)
    return rows


def best(rows: list[Any], algorithm: str) -> Cell:
    """The cell that the rule chooses."""
    chosen = max((row for row in rows if row["algorithm"] == algorithm), key=lambda row: row["mean"])
    return Cell(algorithm, chosen["learning_rate"], chosen["parameters"])


def main() -> None:
    """Search, check, and write the file."""
    began = time.monotonic()
    with ProcessPoolExecutor(PROCESSES, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        grid = measure(pool, cells(), SEEDS, validate=True)
        choice = [best(grid, algorithm) for algorithm in PARAMETERS]
        check = measure(pool, choice, CHECK_SEEDS, validate=False)
    facts = {
        "command": "python -m benchmarks.demo_grid",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "seconds": round(time.monotonic() - began),
        "setup": {
            "task": DEMO.task, "clients": DEMO.clients, "dirichlet_alpha": DIRICHLET_ALPHA, "rounds": DEMO.rounds,
            "clients_per_round": DEMO.clients_per_round, "epochs": EPOCHS, "batch_size": BATCH_SIZE, "last": LAST,
            "validation": f"one in {VALIDATION_EVERY} training scans of each digit, held by no client",
        },
        "seeds": SEEDS,
        "rule": RULE,
        "cells": grid,
        "choice": {
            cell.algorithm: {"learning_rate": cell.learning_rate, "parameters": cell.parameters} for cell in choice
        },
        "check": {"seeds": CHECK_SEEDS, "cells": check},
    }  # fmt: skip
    # Lists of numbers on one line, so that a cell is readable.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda numbers: " ".join(numbers.group().split()), json.dumps(facts, indent=1))
    TARGET.write_text(text + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """System, processors and versions, which the results depend on."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "processes": PROCESSES,
        "threads_per_process": 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
