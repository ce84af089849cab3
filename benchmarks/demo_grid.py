"""The grid search for the demo's settings; it writes fl_ops/demo/grid.json.

    python -m benchmarks.demo_grid

Every algorithm gets the same number of cells and the same norms of gradient clipping: FedAvg with fifteen learning
rates, FedCM with three alphas at five rates. Every cell is run with several seeds; a seed decides the data partition,
the first model, the cohorts and the batches. A cell is judged by its averaged model, on one in five of the TRAINING
scans of each digit, which no client has; the 360 scans of the demo's evaluation are not used. The decay of the averaged
models is then chosen for all algorithms together, with the best cell of each and the same seeds and scans.

The best cells are then run with other seeds and all training scans, and evaluated on the 360 scans. This checks the
choice and does not influence it.
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
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.crowds.processes import worker_pool
from fl_ops.demo.settings import BATCH_SIZE, DIRICHLET_ALPHA, LAST, METRICS, STEPS, DemoSettings, Method
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation

TARGET = Path(__file__).parents[1] / "fl_ops" / "demo" / "grid.json"
SEARCH_DECAY = 0.9
DECAYS = (0.7, 0.8, SEARCH_DECAY, 0.95)
NORMS = (0.25, 0.5, 1.0, 2.0)
"""Gradient norms at which local steps are clipped."""
FEDAVG_RATES = (0.2, 0.4, 0.6, 0.8, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 4.8, 6.4, 8.0, 9.6, 12.8)
FEDCM_RATES = (0.8, 1.6, 3.2, 6.4, 12.8)
ALPHAS = (0.2, 0.5, 0.8)
CELL = ("algorithm", "learning_rate", "parameters", "max_gradient_norm")
"""What a cell sets."""
SEEDS = tuple(range(101, 107))
CHECK_SEEDS = tuple(range(201, 221))
DEMO = DemoSettings()
VALIDATION_EVERY = 5
PROCESSES = os.cpu_count() or 1
RULE = (
    f"the cell with the highest validation accuracy of its averaged model, mean of the last {LAST} rounds, averaged "
    "over the seeds; of equals the first"
)


@dataclass(frozen=True)
class Job:
    """One run. decay: of the averaged model; validate: on validation scans, otherwise on the demo's held-out scans."""

    cell: Method
    seed: int
    decay: float
    validate: bool


def cells() -> dict[str, list[Method]]:
    """The whole grid, by algorithm."""
    return {
        "fedavg": [Method("fedavg", rate, {}, norm) for norm, rate in product(NORMS, FEDAVG_RATES)],
        "fedcm": [
            Method("fedcm", rate, {"alpha": alpha}, norm) for norm, alpha, rate in product(NORMS, ALPHAS, FEDCM_RATES)
        ],
    }


def run(job: Job) -> dict[str, list[float]]:
    """Accuracy of each model, latest and averaged, after each round."""
    config = {
        **DEMO.run(job.cell),
        "averaging": {"method": "ema", "decay": job.decay},
        "simulation": {
            "clients": DEMO.clients,
            "names": "client-{index}",
            "partition": {"method": "dirichlet", "alpha": DIRICHLET_ALPHA},
            "validation_every": VALIDATION_EVERY if job.validate else 0,
        },
    }
    prepared = prepare(parse_simulation(config), job.seed)
    with Simulation(prepared.config, prepared.clients, task=prepared.server_task) as simulated:
        metrics = [done.metrics for done in simulated.rounds()]
    return {model: [values[metric] for values in metrics] for model, metric in METRICS.items()}


class Search:
    """Runs cells in several processes, the same way for search and check."""

    def __init__(self, pool: ProcessPoolExecutor, seeds: tuple[int, ...], *, validate: bool) -> None:
        self._pool = pool
        self._seeds = seeds
        self._validate = validate

    def measure(self, cells: Iterable[Method], decay: float) -> list[dict[str, Any]]:
        """Run each cell with all seeds. Returns each cell with the accuracies of both of its models."""
        cells, rows = list(cells), []
        accuracies = self._pool.map(
            run, [Job(cell, seed, decay, self._validate) for cell in cells for seed in self._seeds]
        )
        for cell in cells:
            done = [next(accuracies) for _ in self._seeds]
            rows.append({**_facts(cell), **{model: _last([one[model] for one in done]) for model in METRICS}})
            print(decay, json.dumps(rows[-1]), file=sys.stderr, flush=True)
        return rows


def _facts(cell: Method) -> dict[str, Any]:
    return {key: asdict(cell)[key] for key in CELL}


def _last(runs: list[list[float]]) -> dict[str, Any]:
    """Mean and worst accuracy of the last rounds, by seed, and the average of the means."""
    means = [round(fmean(accuracies[-LAST:]), 4) for accuracies in runs]
    worst = [round(min(accuracies[-LAST:]), 4) for accuracies in runs]
    return {"mean": round(fmean(means), 4), "mean_by_seed": means, "worst_by_seed": worst}


def main() -> None:
    """Search, check, and write the file."""
    began = time.monotonic()
    with worker_pool(PROCESSES) as pool:
        search = Search(pool, SEEDS, validate=True)
        rows = {name: search.measure(methods, SEARCH_DECAY) for name, methods in cells().items()}
        best = [max(of_one, key=lambda row: row["averaged"]["mean"]) for of_one in rows.values()]
        choice = [Method(**{key: row[key] for key in CELL}) for row in best]
        decays = {decay: best if decay == SEARCH_DECAY else search.measure(choice, decay) for decay in DECAYS}
        averages = {one: round(fmean(row["averaged"]["mean"] for row in rows), 4) for one, rows in decays.items()}
        decay = max(averages, key=lambda one: averages[one])
        check = Search(pool, CHECK_SEEDS, validate=False).measure(choice, decay)
    facts = {
        "command": "python -m benchmarks.demo_grid",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "seconds": round(time.monotonic() - began),
        "setup": setup(),
        "seeds": SEEDS,
        "rule": RULE,
        "cells": [row for of_one in rows.values() for row in of_one],
        "choice": {
            cell.algorithm: {key: row for key, row in _facts(cell).items() if key != "algorithm"} for cell in choice
        },
        "decays": [{"decay": one, "mean": mean} for one, mean in averages.items()],
        "decay": decay,
        "check": {"seeds": CHECK_SEEDS, "cells": check},
    }
    # Lists of numbers on one line, so that a cell is readable.
    text = re.sub(r"\[[^\[\]{}]*\]", lambda numbers: " ".join(numbers.group().split()), json.dumps(facts, indent=1))
    TARGET.write_text(text + "\n", encoding="utf-8")


def setup() -> dict[str, Any]:
    """The demo's settings that the search has in common with it."""
    return {
        "task": DEMO.task,
        "clients": DEMO.clients,
        "dirichlet_alpha": DIRICHLET_ALPHA,
        "rounds": DEMO.rounds,
        "clients_per_round": DEMO.clients_per_round,
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "last": LAST,
        "search_decay": SEARCH_DECAY,
        "validation": f"one in {VALIDATION_EVERY} training scans of each digit, held by no client",
    }


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
