"""Seconds of whole simulated rounds in lockstep: networks of the papers on images of noise.

    python -m benchmarks.lockstep.rounds --device cuda                    # the table
    python -m benchmarks.lockstep.rounds --only "two-layer CNN" --precision tf32

Each run is a whole simulation without evaluations. The first rounds are not counted: they choose a strategy and record
steps. Prints a JSON line for each run at once, and the table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lockstep.strategies import two_layer_cnn
from benchmarks.table import markdown
from fl_common.allocator import keep_freed_memory
from fl_ops.simulate.clients import SimulatedClients
from fl_ops.simulate.engine_choice import EngineOptions
from fl_ops.simulate.engines.batched import BatchedOptions
from fl_ops.simulate.simulation import Simulation
from fl_server.run_settings.config import RunConfig
from fl_tasks import Examples, Shard
from fl_tasks.models import ResNet18, lenet

UNCOUNTED = 5
SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Setting:
    """Clients of a round and their work."""

    model: Callable[[], nn.Module]
    cohort: int
    examples: int
    batch: int
    epochs: int
    methods: Sequence[str]


SETTINGS = {
    "two-layer CNN": Setting(two_layer_cnn, 50, 50, 10, 1, ("fedavg",)),
    "797,962 parameters": Setting(lenet, 10, 400, 50, 5, ("fedavg", "fedcm")),
    "ResNet-18-GN": Setting(ResNet18, 10, 400, 50, 5, ("fedavg", "fedcm", "fedsam")),
}


class Noise:
    """A task: images of noise in bytes, of ten classes."""

    version = "1"

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def model(self) -> nn.Module:
        """The setting's."""
        return self._setting.model()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy."""
        return nn.functional.cross_entropy(output, target)

    def train_data(self, shard: Shard) -> Examples:
        """Enough for twice the clients of a round."""
        count, random = 2 * self._setting.cohort * self._setting.examples, torch.Generator().manual_seed(0)
        images = torch.randint(256, (count, *SHAPE), dtype=torch.uint8, generator=random)
        examples = Examples(images, torch.randint(10, (count,), generator=random), prepare=normalised)
        return examples if shard.indices is None else examples[shard.indices]

    def eval_data(self, shard: Shard | None = None) -> Examples | None:
        """None: nothing is evaluated."""
        del shard
        return None

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Unused."""
        return {"loss": nn.functional.cross_entropy(output, target, reduction="none")}


def normalised(images: Tensor) -> Tensor:
    """Bytes -> floats around 0."""
    return images.float().div(127.5).sub(1.0)


def measure(setting: Setting, method: str, options: BatchedOptions, rounds: int) -> dict[str, Any]:
    """Seconds of the clock for each counted round, and what the engine chose."""
    torch.set_num_threads(1)
    clients = 2 * setting.cohort
    parts = torch.arange(clients * setting.examples).split(setting.examples)
    simulated = SimulatedClients("noise", Noise(setting), {f"c{i:03}": part for i, part in enumerate(parts)})
    config = RunConfig.model_validate(
        {
            "name": "rounds",
            "task": {"name": "noise"},
            "algorithm": {"name": method},
            "local": {"learning_rate": 0.01, "batch_size": setting.batch, "epochs": setting.epochs},
            "round": {"clients_per_round": setting.cohort, "min_clients": setting.cohort},
            "stop": {"rounds": UNCOUNTED + rounds},
            "evaluation": {"every": 0},
            "population": clients,
        }
    )
    with Simulation(config, simulated, engine=EngineOptions(batched=options)) as simulation:
        ends = []
        for _ in simulation.rounds():
            if options.device.type == "cuda":
                torch.cuda.synchronize(options.device)
            ends.append(time.perf_counter())
        chosen = simulation.federation.engine_report
    if len(ends) < UNCOUNTED + rounds:
        raise RuntimeError(f"expected {UNCOUNTED + rounds} rounds, got {len(ends)}: {simulation.failures[-1:]}")
    seconds = [after - before for before, after in zip(ends[UNCOUNTED - 1 :], ends[UNCOUNTED:], strict=False)]
    return {"seconds": [round(duration, 4) for duration in seconds], "engine": chosen}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description="Seconds of whole simulated rounds in lockstep.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["float32", "tf32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=20, help="counted rounds of each run")
    parser.add_argument("--only", nargs="+", choices=[*SETTINGS], default=[*SETTINGS])
    case = parser.parse_args(arguments)
    keep_freed_memory()
    options, rows = BatchedOptions(torch.device(case.device), precision=case.precision), []
    for name in case.only:
        for method in SETTINGS[name].methods:
            found = measure(SETTINGS[name], method, options, case.rounds)
            print(json.dumps({"setting": name, "method": method, "precision": case.precision, **found}), flush=True)
            seconds = found["seconds"]
            rows.append(
                {
                    "setting": name,
                    "method": method,
                    "precision": case.precision,
                    "seconds a round": f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})",
                }
            )
    for line in markdown(rows):
        print(line)


if __name__ == "__main__":
    main()
