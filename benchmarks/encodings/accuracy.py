"""The accuracy of runs whose updates, models and directions travel in encodings.

    python -m benchmarks.encodings.accuracy --task fashion-mnist --data-root DIR --processes 2 --out FILE.json

Each case runs under each seed, as `fl simulate` does it. Finished runs are kept in the file, so the same command goes
on where it was stopped. It prints a table: the mean of the last five evaluations, over the seeds, and the bytes of all
updates relative to float32. `--cases` selects a group: every encoding, few of them, or the direction as reference with
each method that has one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.crowds.processes import worker_pool
from benchmarks.table import markdown
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation

LAST = 5
"""Evaluations of which a run's accuracy is the mean."""
SEEDS = (1, 2, 3)
METHODS: Mapping[str, dict[str, Any]] = {
    "FedAvg": {"algorithm": {"name": "fedavg"}, "rate": 0.2},
    "FedCM, alpha 0.1": {"algorithm": {"name": "fedcm", "parameters": {"alpha": 0.1}}, "rate": 0.4},
    "FedCM, alpha 0.3": {"algorithm": {"name": "fedcm", "parameters": {"alpha": 0.3}}, "rate": 0.4},
    "MoFedSAM, beta 0.1": {"algorithm": {"name": "mofedsam", "parameters": {"rho": 0.1, "beta": 0.1}}, "rate": 0.4},
    "MimeLite, clipped": {"algorithm": {"name": "mimelite", "parameters": {"beta": 0.9}}, "rate": 0.1, "clip": 1.0},
    "QG": {"algorithm": {"name": "qg", "parameters": {"beta": 0.9}}, "rate": 0.1},
    "MFL": {"algorithm": {"name": "mfl", "parameters": {"gamma": 0.9}}, "rate": 0.05},
    "SCAFFOLD II": {"algorithm": {"name": "scaffold", "parameters": {"option": "II"}}, "rate": 0.05},
}
"""Rates are those that the search of docs/measurements/results.md chose or had within its range, for Fashion-MNIST."""
MEASURED = ("FedAvg", "FedCM, alpha 0.1")
"""The methods whose runs are measured with every encoding."""
UPDATES = ("plain", "bf16", "int8", "int4", "int2", "eden4", "eden2", "eden1")
TASKS: Mapping[str, dict[str, Any]] = {
    "fashion-mnist": {"rounds": 40, "batch_size": 25, "alpha": 0.3, "clients": 10},
    # FedAvg: the best of 0.025, 0.05, 0.1 and 0.2 under one seed; with 0.2 it falls back to chance under others.
    "cifar10": {"rounds": 40, "batch_size": 25, "alpha": 0.6, "clients": 10, "rates": {"FedAvg": 0.1}},
}
"""Settings of the runs. rates: of methods that need another one than that of METHODS."""


@dataclass(frozen=True)
class Case:
    """A method with encodings."""

    method: str
    encodings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name in the table."""
        return ", ".join(f"{bundle} {name}" for bundle, name in self.encodings.items()) or "plain"


def every_encoding() -> Iterator[Case]:
    """Every encoding of the update, and some of the model and the direction."""
    for method in MEASURED:
        yield from (Case(method, {} if update == "plain" else {"update": update}) for update in UPDATES)
        yield Case(method, {"update": "topk", "fraction": 0.05})
        yield Case(method, {"update": "int8", "model": "bf16"})
        yield Case(method, {"update": "int8", "model": "int8"})
    for update in ("int4", "int2", "eden2", "eden1"):
        yield Case("FedCM, alpha 0.1", {"update": update, "reference": "direction"})
    yield Case("FedCM, alpha 0.1", {"update": "int8", "model": "int8", "direction": "int8"})


def few_encodings() -> Iterator[Case]:
    """The encodings that a link asks for: a quarter, a sixteenth and a thirty-second of the bytes."""
    for method in MEASURED:
        yield Case(method)
        yield from (Case(method, {"update": update}) for update in ("int8", "int2", "eden2", "eden1"))
        yield Case(method, {"update": "int8", "model": "int8"})
    for update in ("int2", "eden2", "eden1"):
        yield Case("FedCM, alpha 0.1", {"update": update, "reference": "direction"})


def references() -> Iterator[Case]:
    """Two narrow encodings with and without the direction as reference, for the methods that are not in the others."""
    for method in METHODS:
        if method in MEASURED:
            continue
        yield Case(method)
        for update in ("int2", "eden1"):
            yield Case(method, {"update": update})
            yield Case(method, {"update": update, "reference": "direction"})


GROUPS: Mapping[str, Callable[[], Iterator[Case]]] = {
    "all": every_encoding,
    "few": few_encodings,
    "references": references,
}


def run(task: str, data_root: str, case: Case, seed: int) -> dict[str, Any]:
    """One run: its accuracy, and its bytes of updates and of downloads."""
    torch.set_num_threads(1)
    setting, method = TASKS[task], METHODS[case.method]
    config = parse_simulation(
        {
            "seed": seed,
            "task": {"name": task, "options": {"model": "cnn-small", "data_root": data_root}},
            "algorithm": method["algorithm"],
            "local": {
                "learning_rate": setting.get("rates", {}).get(case.method, method["rate"]),
                "epochs": 1,
                "batch_size": setting["batch_size"],
                "max_gradient_norm": method.get("clip", 0.0),
            },
            "round": {"clients_per_round": setting["clients"]},
            "stop": {"rounds": setting["rounds"]},
            "evaluation": {"every": 2},
            "simulation": {"clients": 100, "partition": {"method": "dirichlet", "alpha": setting["alpha"]}},
            **({"encodings": dict(case.encodings)} if case.encodings else {}),
        }
    )
    prepared = prepare(config, seed)
    with Simulation(prepared.config, prepared.clients, task=prepared.server_task) as simulation:
        rounds = list(simulation.rounds())
        diverged = simulation.diverged
    found = [done.metrics["accuracy"] for done in rounds if "accuracy" in done.metrics]
    return {
        "case": case.name,
        "method": case.method,
        "seed": seed,
        "accuracy": None if diverged else statistics.mean(found[-LAST:]),
        "bytes_up": sum(done.bytes_up for done in rounds),
        "bytes_down": sum(done.bytes_down for done in rounds),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing in the file, and print the table."""
    options = _parser().parse_args(arguments)
    done: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out.exists() else []
    known = {(run["method"], run["case"], run["seed"]) for run in done}
    cases, seeds = list(GROUPS[options.cases]()), SEEDS[: options.seeds]
    missing = [(case, seed) for seed in seeds for case in cases if (case.method, case.name, seed) not in known]
    with worker_pool(options.processes) as pool:
        futures = [pool.submit(run, options.task, options.data_root, case, seed) for case, seed in missing]
        for number, future in enumerate(as_completed(futures), start=1):
            done.append(future.result())
            options.out.write_text(json.dumps(done, indent=1))
            print(f"{number} of {len(missing)}: {json.dumps(done[-1])}", flush=True)
    print("\n".join(markdown(table(cases, done))))


def table(cases: Iterable[Case], done: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """A row for each case, in percent."""
    for case in cases:
        runs = [run for run in done if (run["method"], run["case"]) == (case.method, case.name)]
        plain = [run for run in done if (run["method"], run["case"]) == (case.method, "plain")]
        found = [100 * run["accuracy"] for run in runs if run["accuracy"] is not None]
        if not found or not plain:
            continue
        base = {run["seed"]: 100 * run["accuracy"] for run in plain if run["accuracy"] is not None}
        apart = [100 * run["accuracy"] - base[run["seed"]] for run in runs if run["accuracy"] is not None]
        yield {
            "method": case.method,
            "encodings": case.name,
            "last 5 evaluations, %": f"{statistics.mean(found):.2f} ± {_spread(found):.2f}",
            "to float32, same seeds": f"{statistics.mean(apart):+.2f} ± {_spread(apart):.2f}",
            "bytes up": f"{_ratio(runs, plain, 'bytes_up'):.4f}",
            "bytes down": f"{_ratio(runs, plain, 'bytes_down'):.4f}",
        }


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _ratio(runs: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(statistics.mean(run[key] for run in runs) / statistics.mean(run[key] for run in plain))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The accuracy of runs with encodings.")
    parser.add_argument("--task", choices=TASKS, default="fashion-mnist")
    parser.add_argument("--cases", choices=GROUPS, default="all")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="number of seeds of each case")
    parser.add_argument("--data-root", required=True, help="a torchvision folder with the data set")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time, of one thread each")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of finished runs")
    return parser


if __name__ == "__main__":
    main()
