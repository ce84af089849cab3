"""Processor time of a simulated round that trains next to nothing: what remains is the simulation's own work.

    python -m benchmarks.host_time --beside ../another-tree   # this tree and another one in turn

A model of two parameters, 50 clients a round, 5 steps of 10 examples each, all in lockstep, no evaluation. Each
measurement is a process of its own. The first rounds are not counted. Prints a JSON line for each measurement, and the
table. Times are of the processor, of all threads, so other programs on the machine disturb them less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.table import markdown
from fl_ops.simulate import reports
from fl_ops.simulate.clients import SimulatedClients
from fl_ops.simulate.engine_choice import EngineOptions
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_ops.simulate.simulation import Simulation
from fl_server.run_settings.config import RunConfig
from fl_tasks import Examples, Shard

ROOT = Path(__file__).resolve().parents[1]
POPULATION, COHORT, EXAMPLES, BATCH = 200, 50, 50, 10
STEPS = EXAMPLES // BATCH
UNCOUNTED = 5
"""Rounds at the start: they choose a strategy, and load what the later ones have."""
CLOCK, TOTAL = "clock", "total"


class Line:
    """A task: fit y = a x + b."""

    version = "1"

    def model(self) -> nn.Module:
        """Two parameters."""
        return nn.Linear(1, 1)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean squared error."""
        return nn.functional.mse_loss(output, target)

    def train_data(self, shard: Shard) -> Examples:
        """Points on a line with noise."""
        random = torch.Generator().manual_seed(0)
        inputs = torch.randn(POPULATION * EXAMPLES, 1, generator=random)
        points = Examples(inputs, 2 * inputs + 0.1 * torch.randn(inputs.shape, generator=random))
        return points if shard.indices is None else points[shard.indices]

    def eval_data(self, shard: Shard | None = None) -> Examples | None:
        """None: nothing is evaluated."""
        del shard
        return None

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Unused."""
        return {"loss": (output - target).square().flatten()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    case = _parser().parse_args(arguments)
    if case.once:
        print(json.dumps(measure(case)))
        return
    trees = {"this": ROOT} | ({} if case.beside is None else {"beside": case.beside.resolve()})
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for _ in range(case.repeats):
        for name, tree in trees.items():
            found[name].append(_in_process(tree, case))
            print(json.dumps({"tree": name} | found[name][-1]), flush=True)
    for line in table(found):
        print(line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Processor time of a simulated round without much training.")
    parser.add_argument("--beside", type=Path, help="a folder with another version of the repository")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each")
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--once", action="store_true", help="one measurement in this process, as JSON")
    return parser


def measure(case: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of the processor for each client and step of the counted rounds, also by part of a round."""
    torch.set_num_threads(1)
    vars(reports)["perf_counter"] = time.process_time
    ids = [f"client-{index:03}" for index in range(POPULATION)]
    parts = torch.arange(POPULATION * EXAMPLES).split(EXAMPLES)
    clients = SimulatedClients("line", Line(), dict(zip(ids, parts, strict=True)))
    config = RunConfig.model_validate(
        {
            "name": "host-time",
            "task": {"name": "line"},
            "algorithm": {"name": case.algorithm},
            "local": {"learning_rate": 0.01, "batch_size": BATCH},
            "round": {"clients_per_round": COHORT, "min_clients": COHORT},
            "stop": {"rounds": UNCOUNTED + case.rounds},
            "evaluation": {"every": 0},
            "population": POPULATION,
        }
    )
    engine = EngineOptions(batched=BatchedOptions(torch.device(case.device)))
    with Simulation(config, clients, engine=engine) as simulation:
        rounds = simulation.rounds()
        before = [_times(simulation) for _, _ in zip(range(UNCOUNTED), rounds, strict=False)][-1]
        after = [_times(simulation) for _ in rounds][-1]
    used = {name: after[name] - before[name] for name in after}
    clock, total = used.pop(CLOCK), used.pop(TOTAL)
    used[reports.OTHER] = total - sum(used.values())
    counted = 1e6 / (case.rounds * COHORT * STEPS)
    return {
        "algorithm": case.algorithm,
        "device": case.device,
        "us_per_client_step": round(counted * total, 2),
        "ms_per_round": round(1e3 * total / case.rounds, 2),
        "clock_ms_per_round": round(1e3 * clock / case.rounds, 2),
        "parts_us": {name: round(counted * value, 2) for name, value in used.items()},
    }


def _times(simulation: Simulation) -> dict[str, float]:
    """Seconds since the start: of the clock, of the processor, and of the processor by part of a round."""
    parts = {name: value for name, value in simulation.profile().items() if name != reports.OTHER}
    return {CLOCK: time.monotonic(), TOTAL: time.process_time(), **parts}


def _in_process(tree: Path, case: argparse.Namespace) -> dict[str, Any]:
    """One measurement with the packages of a tree."""
    command = [sys.executable, "-P", __file__, "--once", "--rounds", str(case.rounds)]
    command += ["--algorithm", case.algorithm, "--device", case.device]
    done = subprocess.run(  # noqa: S603 - our own command
        command, env={**os.environ, "PYTHONPATH": str(tree)}, cwd=tree, stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Rows of Markdown: median and range of each tree, and medians by part."""
    return markdown(
        {
            "tree": name,
            "microseconds a client and step": _with_range([row["us_per_client_step"] for row in rows]),
            **{part: f"{statistics.median(row['parts_us'][part] for row in rows):.1f}" for part in rows[0]["parts_us"]},
        }
        for name, rows in found.items()
    )


def _with_range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
