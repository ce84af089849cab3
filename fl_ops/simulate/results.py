"""What a simulated run leaves behind: numbers of its rounds, all of its settings, and its model."""

from __future__ import annotations

import csv
import io
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fl_ops.files import Target, written_whole
from fl_ops.simulate.clients import Dealt
from fl_ops.simulate.settings import Plan
from fl_ops.simulate.simulation import RoundResult, Simulation

ROUNDS, RESULT, MODEL = "rounds.csv", "result.json", "model.safetensors"


@dataclass
class SeedResult:
    """A run under one seed as it went. status: "completed", "failed" or "interrupted"."""

    seed: int
    settings: Mapping[str, Any]
    rounds: list[RoundResult] = field(default_factory=list)
    status: str = "running"
    reason: str = ""

    @property
    def evaluated(self) -> list[RoundResult]:
        """The rounds that have metrics."""
        return [each for each in self.rounds if each.metrics]

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {**asdict(self), "rounds": [asdict(each) for each in self.rounds]}


def settings_of(plan: Plan, dealt: Dealt, simulation: Simulation) -> dict[str, Any]:
    """Everything that decides the numbers, with every default filled in."""
    algorithm, section = simulation.federation.engine.algorithm, plan.simulation
    version = next(iter(dealt.clients.values())).fingerprint
    config = simulation.config.model_dump(exclude_none=True)
    # The run's own table has what its author wrote; this one has the rest, by the names of the papers.
    config["algorithm"] = {"name": algorithm.name, "parameters": dict(algorithm.parameters)}
    return {
        "run": config,
        "simulation": {**section.model_dump(), "partition": asdict(section.partition_spec(simulation.config.seed))},
        "task": {
            "version": version.version,
            "source": version.source,
            "evaluated_on": _evaluated_on(plan, dealt),
        },
        "schedule_rounds": simulation.config.horizon,
        "software": {"python": platform.python_version(), "torch": torch.__version__, "torch_threads": 1},
    }


def _evaluated_on(plan: Plan, dealt: Dealt) -> str:
    every = plan.simulation.validation_every
    if every:
        return f"one in {every} training examples of each class, held by no client"
    return str(getattr(dealt.evaluated, "held_out", "the task's held-out data"))


def write_rounds(folder: Path, rounds: Sequence[RoundResult]) -> None:
    """Rounds, one a line; metrics by their own names. Raises an `OpsError` when the disk does not take it."""
    metrics = sorted({name for each in rounds for name in each.metrics})
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(
        ["round", "clients", "dropped", "attempts", "training_loss", *metrics, "bytes_down", "bytes_up", "seconds",
         "model"]
    )  # fmt: skip
    for each in rounds:
        table.writerow(
            [each.round, len(each.accepted), each.dropped, each.attempts, each.training_loss,
             *(each.metrics.get(name) for name in metrics), each.bytes_down, each.bytes_up, round(each.seconds, 4),
             each.digest]
        )  # fmt: skip
    _write(folder / ROUNDS, text.getvalue().encode())


def write_end(folder: Path, result: SeedResult, model: Mapping[str, torch.Tensor]) -> None:
    """The whole result and the latest good model. Raises an `OpsError` when the disk does not take it."""
    write_rounds(folder, result.rounds)
    _write(folder / RESULT, (json.dumps(result.as_json(), indent=1) + "\n").encode())
    _write(folder / MODEL, save({name: tensor.contiguous() for name, tensor in model.items()}))


def _write(path: Path, content: bytes) -> None:
    with written_whole(Target(path, replace=True)) as file:
        file.write(content)
