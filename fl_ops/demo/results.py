"""The results of a demo: its runs and rounds, their key figures, and the JSON file."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from fl_ops.demo.partitioning import PartitionedData
from fl_ops.demo.recovery import Recovery
from fl_ops.demo.settings import (
    BATCH_SIZE,
    DIRICHLET_ALPHA,
    LAST,
    METRICS,
    STEPS,
    TARGET,
    DemoSettings,
    Method,
    read_grid,
    title,
)
from fl_ops.environment import machine, versions
from fl_web.facts.rounds import Round


@dataclass(frozen=True)
class Curve:
    """The accuracy of one model of a run, after each round."""

    accuracies: tuple[float, ...]

    @property
    def last(self) -> tuple[float, ...]:
        """Those of the last LAST rounds, or all if there are fewer."""
        return self.accuracies[-LAST:]

    @property
    def final(self) -> float:
        """Accuracy after the last round."""
        return self.accuracies[-1]

    @property
    def mean_last(self) -> float:
        """Mean accuracy of the last rounds."""
        return fmean(self.last)

    @property
    def worst_last(self) -> float:
        """Lowest accuracy of the last rounds."""
        return min(self.last)

    @property
    def rounds_to_target(self) -> int | None:
        """Number of rounds until the accuracy first reached TARGET; None if it never did."""
        return next((number for number, accuracy in enumerate(self.accuracies, 1) if accuracy >= TARGET), None)


@dataclass(frozen=True)
class Result:
    """One algorithm's run. parameters: all of them, with defaults; seconds: from its creation to its end."""

    method: Method
    parameters: dict[str, Any]
    rounds: tuple[Round, ...]
    seconds: float

    @property
    def title(self) -> str:
        """The algorithm's name as written in papers."""
        return title(self.method.algorithm)

    @property
    def label(self) -> str:
        """Title and chosen parameters, without defaults: "FedCM, alpha 0.2"."""
        return ", ".join([self.title, *(f"{key} {value}" for key, value in self.method.parameters.items())])

    @property
    def curves(self) -> dict[str, Curve]:
        """The curve of each model of METRICS."""
        return {model: Curve(tuple(row.metrics[metric] for row in self.rounds)) for model, metric in METRICS.items()}

    @property
    def averaged(self) -> Curve:
        """The curve of the averaged model, by which algorithms are compared."""
        return self.curves["averaged"]

    @property
    def bytes_down(self) -> int:
        """Tensor bytes to the clients."""
        return self.rounds[-1].total_down

    @property
    def bytes_up(self) -> int:
        """Tensor bytes from the clients."""
        return self.rounds[-1].total_up


@dataclass(frozen=True)
class Demo:
    """A finished demo. start_seconds: until all daemons were present; seconds: the whole demo."""

    settings: DemoSettings
    data: PartitionedData
    results: list[Result]
    start_seconds: float
    seconds: float
    recovery: Recovery | None = None
    """What became of the run whose coordinator was killed. None: there were too few rounds."""
    faults: list[str] = field(default_factory=list)
    """A sentence for each faulty client."""


def as_json(demo: Demo) -> dict[str, Any]:
    """The content of the JSON file: settings, seeds, rounds, versions, and the grid search with its choice."""
    settings = demo.settings
    return {
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(demo.seconds, 2),
        "start_seconds": round(demo.start_seconds, 2),
        "settings": {
            "task": settings.task,
            "options": settings.options,
            "held_out": demo.data.held_out,
            "evaluation_examples": demo.data.evaluation_examples,
            "seed": settings.seed,
            "rounds": settings.rounds,
            "clients": settings.clients,
            "clients_per_round": settings.clients_per_round,
            "averaging": settings.averaging,
            "steps": STEPS,
            "batch_size": BATCH_SIZE,
            "partition": _partition(demo.data.method, settings.seed),
            "device": "cpu",
        },
        "classes_by_client": demo.data.classes if demo.data.method == "dirichlet" else None,
        "examples_by_client": [sum(row) for row in demo.data.classes],
        "algorithms": {result.method.algorithm: _result_as_json(result) for result in demo.results},
        "recovery": None if demo.recovery is None else demo.recovery.as_json(),
        "faults": demo.faults,
        "grid": read_grid() if settings.tuned else None,
        "versions": versions(),
        "machine": machine(),
    }


def _result_as_json(result: Result) -> dict[str, Any]:
    return {
        "learning_rate": result.method.learning_rate,
        "parameters": result.parameters,
        "max_gradient_norm": result.method.max_gradient_norm,
        "source": result.method.source,
        "target": TARGET,
        **{model: _curve_as_json(curve) for model, curve in result.curves.items()},
        "bytes_down": result.bytes_down,
        "bytes_up": result.bytes_up,
        "seconds": round(result.seconds, 2),
        "rounds": [_round_as_json(row) for row in result.rounds],
    }


def _round_as_json(committed: Round) -> dict[str, Any]:
    return {
        "number": committed.round,
        "accuracy": {model: committed.metrics[metric] for model, metric in METRICS.items()},
        "loss": committed.metrics.get("loss"),
        "seconds": committed.seconds,
        "clients": committed.accepted,
        "bytes_down": committed.down,
        "bytes_up": committed.up,
    }


def _curve_as_json(curve: Curve) -> dict[str, Any]:
    return {
        "final": curve.final,
        "mean_last": curve.mean_last,
        "worst_last": curve.worst_last,
        "last": len(curve.last),
        "rounds_to_target": curve.rounds_to_target,
    }


def _partition(method: str, seed: int) -> dict[str, Any]:
    return {"method": method, **({"alpha": DIRICHLET_ALPHA} if method == "dirichlet" else {}), "seed": seed}
