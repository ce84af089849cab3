"""The files of a simulated run: rounds as CSV, settings and results as JSON, models as safetensors, and a plot."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save

from fl_common.units import counted
from fl_ops.files import Target, written_whole
from fl_ops.render.figures import COLOURS, INK, csv_text, marker_for, new_figure, plain_axes
from fl_ops.simulate.clients import PreparedRun
from fl_ops.simulate.reports import RoundResult
from fl_ops.simulate.settings import SimulationConfig, SimulationSection
from fl_ops.simulate.simulation import Simulation
from fl_server.rounds.metrics import Criterion
from fl_server.store.checkpoint_files import separate
from fl_server.store.checkpoints import AVERAGED, COMMITTED, HOLDS

ROUNDS, RESULT, MODEL = "rounds.csv", "result.json", "model.safetensors"
AVERAGED_MODEL = "averaged.safetensors"
_SIMULATED = ("simulated_s", "simulated_total_s")


@dataclass
class SeedResult:
    """A run under one seed. status: "running", "completed", "failed" or "interrupted"."""

    seed: int
    settings: Mapping[str, Any]
    rounds: list[RoundResult] = field(default_factory=list)
    status: str = "running"
    reason: str = ""
    model: str = ""
    """Digest of the latest committed model, as in a coordinator's ledger; empty until the run ends."""
    profile: Mapping[str, float] = field(default_factory=dict)
    """Seconds of this process by what they were used for; empty until the run ends."""

    @property
    def criterion(self) -> Criterion:
        """The metric that selects the best round."""
        stop = self.settings["run"]["stop"]
        return Criterion(str(stop["metric"]), bool(stop["lower_is_better"]))

    @property
    def evaluated(self) -> list[RoundResult]:
        """The rounds that have metrics."""
        return [row for row in self.rounds if row.metrics]

    def as_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        return {**asdict(self), "rounds": [row.as_json() for row in self.rounds]}


def settings_of(config: SimulationConfig, prepared: PreparedRun, simulation: Simulation) -> dict[str, Any]:
    """All settings that decide the results, including the defaults."""
    algorithm, section = simulation.federation.engine.algorithm, config.simulation
    fingerprint = next(iter(prepared.clients.values())).fingerprint
    run = simulation.config.model_dump(exclude_none=True)
    # The run's file has only the parameters that its author set; here are all of them.
    run["algorithm"]["parameters"] = dict(algorithm.parameters)
    return {
        "run": run,
        "simulation": section.model_dump() | _partition(section, simulation.config.seed),
        "task": {
            "version": fingerprint.version,
            "source": fingerprint.source,
            "evaluated_on": _evaluated_on(config, prepared),
        },
        "schedule_rounds": simulation.config.horizon,
        "software": {"python": platform.python_version(), "torch": torch.__version__, "torch_threads": 1},
    }


def _partition(section: SimulationSection, seed: int) -> dict[str, Any]:
    """The partition with its seed; clients with a folder each have none."""
    return {"partition": {} if section.folders else asdict(section.partition_spec(seed))}


def _evaluated_on(config: SimulationConfig, prepared: PreparedRun) -> str:
    every = config.simulation.validation_every
    if every:
        return f"one in {counted(every, 'training example')} of each class, held by no client"
    return str(getattr(prepared.server_task, "held_out", "the task's held-out data"))


def write_rounds(folder: Path, rounds: Sequence[RoundResult]) -> None:
    """Write rounds.csv: a line for each round, a column for each metric.

    There are columns of simulated time, digests and measures only if the run has them.

    Raises OpsError if it cannot be written.
    """
    metrics = sorted({name for row in rounds for name in row.metrics})
    measured = sorted({name for row in rounds for name in row.measured})
    timed, digests = (
        [name for name in names if any(getattr(row, name) is not None for row in rounds)]
        for names in (_SIMULATED, ("digest",))
    )
    heads = ["round", "clients", "dropped", "attempts", "training_loss", *metrics, "bytes_down", "bytes_up"]
    lines = (
        [row.round, len(row.accepted), row.dropped, row.attempts, row.training_loss,
         *(row.metrics.get(name) for name in metrics), row.bytes_down, row.bytes_up, round(row.seconds, 4),
         *(getattr(row, name) for name in (*timed, *digests)), *map(row.measured.get, measured)]
        for row in rounds
    )  # fmt: skip
    text = csv_text([*heads, "seconds", *timed, *("model" for _ in digests), *measured], lines)
    _write(folder / ROUNDS, text.encode())


def write_end(
    folder: Path,
    result: SeedResult,
    model: Mapping[str, torch.Tensor],
    averaged: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write all files, with the latest committed model, and the averaged one if there is one.

    Raises OpsError if they cannot be written.
    """
    write_rounds(folder, result.rounds)
    _write(folder / RESULT, (json.dumps(result.as_json(), indent=1) + "\n").encode())
    _write(folder / MODEL, save(separate(model), None if averaged is None else {HOLDS: COMMITTED}))
    if averaged is not None:
        _write(folder / AVERAGED_MODEL, save(separate(averaged), {HOLDS: AVERAGED}))


def _write(path: Path, content: bytes) -> None:
    with written_whole(Target(path, replace=True)) as file:
        file.write(content)


PLOT = "metric-by-round.png"
_COLOUR, _EACH = COLOURS[0], "#9cc4d6"


def draw(results: Sequence[SeedResult], path: Path) -> bool:
    """Write the plot as PNG. Returns False, without a file, if nothing was evaluated."""
    run = results[0].settings["run"]
    metric = str(run["stop"]["metric"])
    curves = [
        {row.round + 1: row.metrics[metric] for row in result.evaluated if metric in row.metrics} for result in results
    ]
    if not any(curves):
        return False
    figure = new_figure(figsize=(7, 4), dpi=110)
    axes = figure.subplots()
    for curve in curves:
        axes.plot(
            list(curve), list(curve.values()), color=_EACH, linewidth=1.0, marker=marker_for(len(curve)), markersize=3
        )
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    means = [fmean(curve[at] for curve in curves) for at in shared]
    axes.plot(shared, means, color=_COLOUR, linewidth=1.8, marker=marker_for(len(shared)), markersize=4)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("Rounds done", color=INK)
    axes.set_ylabel(metric, color=INK)
    seeds = f"mean and each of {counted(len(curves), 'seed')}" if len(curves) > 1 else f"seed {results[0].seed}"
    axes.set_title(f"{run['task']['name']}, {run['algorithm']['name']}, {seeds}", loc="left", color=INK, fontsize=10)
    plain_axes(axes, labels=10)
    figure.savefig(path)
    return True
