"""Time and bytes to an accuracy with slow clients: cohorts, over-selection, and a buffer, in simulated time.

    python -m benchmarks.buffered        # writes docs/measurements/benchmarks/buffered.json and prints its table

Real scans of digits, a perceptron (`benchmarks.perceptron`), 40 clients with Dirichlet 0.3, each with ten steps of
batches of 16. A client's speed is lognormal (median 16 examples a second, sigma 1), so an update takes about 10 s in
the median and 16 s in the mean. Ten clients work at a time in every arm, and every run has 600 simulated seconds:

    cohort   rounds of ten, which end with the last of them
    goal     rounds of the first eight of ten (over-selection, which adapts)
    buffer   a step for every five updates, weights by staleness (1 + s)^-1/2

FedCM over a buffer is measured with both values of `stale_direction`. Every arm gets twelve cells, judged on one in
five TRAINING scans, which no client has; the best cell runs with other seeds and all training scans, and is evaluated
on 360 others.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.crowds.processes import worker_pool
from benchmarks.table import markdown
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation

RESULTS = Path(__file__).parents[1] / "docs" / "measurements" / "benchmarks" / "buffered.json"
CLIENTS, WORKING, HORIZON_S = 40, 10, 600.0
STEPS, BATCH = 10, 16
SEARCH_SEED, SEEDS = 1, (11, 12, 13)
TARGETS = (0.85, 0.9)
SMOOTH = 5
"""Evaluations whose mean must reach a target, so that more evaluations are no advantage."""
SLOW_SHARE = 0.25
"""The slowest quarter of the clients."""
RATES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.2, 1.6)
FEDCM_CELLS = tuple((rate, alpha) for alpha in (0.1, 0.3) for rate in (0.05, 0.1, 0.2, 0.4, 0.8, 1.6))
"""(rate, alpha)."""
SECTIONS: dict[str, dict[str, Any]] = {
    "cohort": {"clients_per_round": WORKING},
    "goal": {"clients_per_round": 8, "close": "goal", "over_selection": 1.25},
    "buffer": {"close": "buffer", "goal": 5, "concurrency": WORKING},
    "buffer, current": {"close": "buffer", "goal": 5, "concurrency": WORKING, "stale_direction": "current"},
}
ARMS = {
    f"{title}, {close}": (name, close)
    for title, name in (("FedAvg", "fedavg"), ("FedCM", "fedcm"))
    for close in SECTIONS
    if (name, close) != ("fedavg", "buffer, current")  # FedAvg has no direction
}
"""Label -> algorithm, how rounds close."""


@dataclass(frozen=True)
class Cell:
    """The settings that an arm is tried with."""

    arm: str
    learning_rate: float
    parameters: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """One run. validate: on training scans that no client has."""

    cell: Cell
    seed: int
    validate: bool


def cells(arm: str) -> list[Cell]:
    """The cells of an arm."""
    if ARMS[arm][0] == "fedavg":
        return [Cell(arm, rate) for rate in RATES]
    return [Cell(arm, rate, {"alpha": alpha}) for rate, alpha in FEDCM_CELLS]


def _config(job: Job) -> dict[str, Any]:
    """The file of a simulation."""
    algorithm, close = ARMS[job.cell.arm]
    speed = {"distribution": "lognormal", "median": BATCH, "sigma": 1.0}
    return {
        "seed": job.seed,
        "task": {"name": "benchmarks.perceptron:DigitsPerceptron"},
        "algorithm": {"name": algorithm, "parameters": job.cell.parameters},
        "local": {"learning_rate": job.cell.learning_rate, "steps": STEPS, "batch_size": BATCH},
        "round": {**SECTIONS[close], "deadline_s": 1e6},
        "stop": {"rounds": 100_000, "wall_time_s": HORIZON_S},
        "simulation": {
            "clients": CLIENTS,
            "names": "client-{index}",
            "partition": {"method": "dirichlet", "alpha": 0.3},
            "validation_every": 5 if job.validate else 0,
            "digests": False,
            "system": {"speed": speed, "latency_s": 0.1},
        },
    }


def run(job: Job) -> dict[str, Any]:
    """The accuracies, times and bytes after each step, and who was in the steps."""
    torch.set_num_threads(1)
    prepared = prepare(parse_simulation(_config(job)), job.seed)
    if (devices := prepared.devices) is None:
        raise RuntimeError("expected simulated devices")
    slowest = sorted(prepared.clients, key=lambda client: devices[client].speed)[: int(SLOW_SHARE * CLIENTS)]
    with Simulation(
        prepared.config, prepared.clients, task=prepared.server_task, devices=devices, digests=False
    ) as simulated:
        rounds = list(simulated.rounds())
        diverged = simulated.diverged
    accepted = [client for done in rounds for client in done.accepted]
    stale = [done.round - version for done in rounds for version in done.versions]
    down = [sum(one.bytes_down for one in rounds[: count + 1]) for count in range(len(rounds))]
    up = [sum(one.bytes_up for one in rounds[: count + 1]) for count in range(len(rounds))]
    return {
        "accuracy": [round(done.metrics["accuracy"], 4) for done in rounds],
        "seconds": [round(done.simulated_total_s or 0.0, 2) for done in rounds],
        "bytes": [a + b for a, b in zip(down, up, strict=True)],
        "updates": len(accepted),
        "slow_share": round(sum(client in slowest for client in accepted) / max(1, len(accepted)), 4),
        "mean_staleness": round(fmean(stale), 2) if stale else 0.0,
        "diverged": diverged,
    }


def score(found: dict[str, Any]) -> float:
    """Mean accuracy over time of the last third of the horizon; -1 for a run that diverged or came to no model."""
    late = [value for value, at in zip(found["accuracy"], found["seconds"], strict=True) if at > HORIZON_S * 2 / 3]
    return -1.0 if found["diverged"] or not late else fmean(late)


def reached(found: dict[str, Any], target: float, of: str) -> float | None:
    """The seconds or bytes at which the mean of SMOOTH evaluations reaches a target; None: never."""
    values = found["accuracy"]
    for last in range(SMOOTH, len(values) + 1):
        if fmean(values[last - SMOOTH : last]) >= target:
            value: float = found[of][last - 1]
            return value
    return None


def main(arguments: Sequence[str] | None = None) -> None:
    """Search, check, write and print."""
    parser = argparse.ArgumentParser(description="Cohorts, over-selection and a buffer in simulated time.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--arms", nargs="*", default=list(ARMS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    case = parser.parse_args(arguments)
    with worker_pool(case.processes, "forkserver") as pool:
        tried = [cell for arm in case.arms for cell in cells(arm)]
        scores: list[float] = []
        for cell, found in zip(tried, pool.map(run, [Job(cell, SEARCH_SEED, True) for cell in tried]), strict=True):
            scores.append(score(found))
            print(cell, round(scores[-1], 4), found["updates"], file=sys.stderr, flush=True)
        best = {
            arm: max(
                ((s, cell) for s, cell in zip(scores, tried, strict=True) if cell.arm == arm), key=lambda it: it[0]
            )
            for arm in case.arms
        }
        jobs = [Job(cell, seed, False) for _, cell in best.values() for seed in SEEDS]
        final = dict(zip(map(_key, jobs), pool.map(run, jobs), strict=True))
    content: dict[str, Any] = {
        "command": "python -m benchmarks.buffered",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
        "search": [{**asdict(cell), "validation": round(s, 4)} for cell, s in zip(tried, scores, strict=True)],
        "rows": [row(best[arm][1], [final[arm, seed] for seed in SEEDS]) for arm in case.arms],
    }
    case.out.parent.mkdir(parents=True, exist_ok=True)
    case.out.write_text(json.dumps(content, indent=1) + "\n")
    for line in markdown([shown(each) for each in content["rows"]]):
        print(line)


def _key(job: Job) -> tuple[str, int]:
    return job.cell.arm, job.seed


def row(cell: Cell, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the report keeps of an arm: numbers by seed, in the order of SEEDS."""
    to_target = {
        f"{of} to {target:g}": [reached(one, target, of) for one in found]
        for target in TARGETS
        for of in ("seconds", "bytes")
    }
    return {
        **asdict(cell),
        "late_accuracy": [round(score(one), 4) for one in found],
        "steps": [len(one["accuracy"]) for one in found],
        **{name: [one[name] for one in found] for name in ("updates", "slow_share", "mean_staleness")},
        **to_target,
    }


def shown(row: dict[str, Any]) -> dict[str, object]:
    """A line of the table: means over the seeds that reached a target, and how many did."""

    def to(target: float, of: str, unit: float, form: str) -> str:
        values = [value / unit for value in row[f"{of} to {target:g}"] if value is not None]
        if not values:
            return "-"
        missing = "" if len(values) == len(SEEDS) else f" ({len(values)} of {len(SEEDS)})"
        return f"{fmean(values):{form}}{missing}"

    setting = ", ".join([f"rate {row['learning_rate']:g}", *(f"{k} {v:g}" for k, v in row["parameters"].items())])
    late = row["late_accuracy"]
    return {
        "arm": row["arm"],
        "setting": setting,
        **{f"s to {target:.0%}": to(target, "seconds", 1.0, ".0f") for target in TARGETS},
        **{f"MB to {target:.0%}": to(target, "bytes", 1e6, ".1f") for target in TARGETS},
        "accuracy, last third": f"{fmean(late):.2%} ± {stdev(late):.2%}",
        "steps": f"{fmean(row['steps']):.0f}",
        "updates": f"{fmean(row['updates']):.0f}",
        "from the slowest quarter": f"{fmean(row['slow_share']):.0%}",
        "mean staleness": f"{fmean(row['mean_staleness']):.1f}",
    }


if __name__ == "__main__":
    main()
