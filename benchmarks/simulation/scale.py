"""Simulations of 100 to 10,000 clients: seconds to start, seconds a round, and peak memory.

    python -m benchmarks.simulation.scale --data ../shared/data --clients 100 1000 10000

Fashion-MNIST, the small CNN, batches of 10, 100 clients a round. Each case is a process of its own, so that the peak is
its own. Prints a JSON line for each case, and with --table the rows of docs/measurements/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import markdown
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.engine_choice import EngineOptions
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation

COHORT = 100


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases and print them."""
    given = _parser().parse_args(arguments)
    if given.one:
        print(json.dumps(measure(given.clients[0], given)))
        return
    found = []
    for clients in given.clients:
        found.append(_in_process(clients, given))
        print(json.dumps(found[-1]), flush=True)
    if given.table:
        print("\n".join(markdown(map(_row, found))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Simulations of many clients.")
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="a torchvision folder")
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--partition", default="dirichlet", help="its method")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="local steps, instead of an epoch")
    parser.add_argument("--table", action="store_true", help="print the rows of a table, too")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    return parser


def _in_process(clients: int, given: argparse.Namespace) -> dict[str, Any]:
    options = ["--clients", str(clients), "--data", str(given.data), "--algorithm", given.algorithm]
    options += ["--partition", given.partition, "--rounds", str(given.rounds), "--workers", str(given.workers)]
    options += ["--steps", str(given.steps)]
    command = [sys.executable, "-m", "benchmarks.simulation.scale", "--one", *options]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout  # noqa: S603 - this module
    found: dict[str, Any] = json.loads(text)
    return found


def measure(clients: int, given: argparse.Namespace) -> dict[str, Any]:
    """One case in this process. The processor's seconds do not depend on what else the machine does."""
    began, cpu = time.monotonic(), time.process_time()
    config = parse_simulation(_table(clients, given))
    run = prepare(config, config.run.seed)
    with Simulation(
        run.config, run.clients, task=run.server_task, engine=EngineOptions(workers=given.workers)
    ) as simulation:
        start_s, start_cpu_s, start_mb = time.monotonic() - began, time.process_time() - cpu, _peak_mb()
        peaks, seconds = [], []
        for done in simulation.rounds():
            seconds.append(done.seconds)
            peaks.append(_peak_mb())
        states = simulation.federation.states
        state_bytes = [states.path(client).stat().st_size for client in states.clients()]
    return {
        "clients": clients,
        "algorithm": given.algorithm,
        "partition": given.partition,
        "workers": given.workers,
        "start_s": round(start_s, 2),
        "start_cpu_s": round(start_cpu_s, 2),
        "start_mb": start_mb,
        "round_s": [round(duration, 3) for duration in seconds],
        "round_cpu_s": round((time.process_time() - cpu - start_cpu_s) / len(seconds), 3),
        "peak_mb": peaks,
        "states": len(state_bytes),
        "states_mb": sum(state_bytes) >> 20,
    }


def _table(clients: int, given: argparse.Namespace) -> dict[str, Any]:
    work = {"steps": given.steps} if given.steps else {"epochs": 1}
    return {
        "task": {"name": "fashion-mnist", "options": {"data_root": str(given.data), "model": "cnn-small"}},
        "algorithm": {"name": given.algorithm},
        "local": {"learning_rate": 0.05, "batch_size": 10, **work},
        "round": {"clients_per_round": min(COHORT, clients)},
        "stop": {"rounds": given.rounds},
        "evaluation": {"every": 0},
        "simulation": {"clients": clients, "partition": {"method": given.partition}, "names": "c-{index:05d}"},
    }


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _row(found: dict[str, Any]) -> dict[str, object]:
    return {
        "clients": f"{found['clients']:,}",
        "algorithm": found["algorithm"],
        "partition": found["partition"],
        "start": f"{found['start_s']:.1f} s",
        "processor's time of it": f"{found['start_cpu_s']:.1f} s",
        "round, median": f"{statistics.median(found['round_s']):.2f} s",
        "processor's time": f"{found['round_cpu_s']:.2f} s",
        "memory at the start": f"{found['start_mb']} MB",
        "after the last round": f"{found['peak_mb'][-1]} MB",
        "files of client states": f"{found['states']:,}, {found['states_mb']} MB",
    }


if __name__ == "__main__":
    main()
