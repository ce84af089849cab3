"""Everything that a demo did, as plain values: what the JSON file holds, and what the page is written from."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fl_ops.demo.dealing import Dealt
from fl_ops.demo.grid import read_grid
from fl_ops.demo.results import Result
from fl_ops.demo.settings import BATCH_SIZE, DIRICHLET_ALPHA, EPOCHS, TARGET, DemoSettings

_PACKAGES = ("impetus-fl", "torch", "numpy", "grpcio", "scikit-learn")


@dataclass(frozen=True)
class Demo:
    """A demo that is over. Seconds: until all daemons were there, and in all."""

    settings: DemoSettings
    dealt: Dealt
    results: list[Result]
    start_seconds: float
    seconds: float


def as_json(demo: Demo) -> dict[str, Any]:
    """The JSON file: settings, seeds, rounds, versions, the grid and its choice."""
    settings = demo.settings
    return {
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(demo.seconds, 2),
        "start_seconds": round(demo.start_seconds, 2),
        "settings": {
            "task": settings.task,
            "options": settings.options,
            "held_out": demo.dealt.held_out,
            "evaluation_examples": demo.dealt.evaluation_examples,
            "seed": settings.seed,
            "rounds": settings.rounds,
            "clients": settings.clients,
            "clients_per_round": settings.clients_per_round,
            "epochs": EPOCHS,
            "batch_size": BATCH_SIZE,
            "partition": {"method": "dirichlet", "alpha": DIRICHLET_ALPHA, "seed": settings.seed},
            "device": "cpu",
        },
        "classes_by_client": demo.dealt.classes,
        "algorithms": {result.method.algorithm: _algorithm(result) for result in demo.results},
        "grid": read_grid() if settings.tuned else None,
        "versions": versions(),
        "machine": machine(),
    }


def _algorithm(result: Result) -> dict[str, Any]:
    return {
        "learning_rate": result.method.learning_rate,
        "parameters": result.parameters,
        "source": result.method.source,
        "final": result.final,
        "mean_last": result.mean_last,
        "worst_last": result.worst_last,
        "last": len(result.last),
        "target": TARGET,
        "rounds_to_target": result.rounds_to_target,
        "bytes_down": result.bytes_down,
        "bytes_up": result.bytes_up,
        "seconds": round(result.seconds, 2),
        "rounds": [asdict(one) for one in result.rounds],
    }


def versions() -> dict[str, str]:
    """Of Python and of the packages that the numbers may depend on."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def machine() -> dict[str, Any]:
    """What the numbers depend on, without a name."""
    return {"system": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count()}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
