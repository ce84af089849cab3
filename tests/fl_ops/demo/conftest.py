"""Results made by hand, and `fl demo` as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fl_ops.demo.partitioning import PartitionedData
from fl_ops.demo.results import Demo, Result
from fl_ops.demo.settings import DemoSettings
from fl_web.facts.rounds import rounds_of
from protos.fl.v1.admin_pb2 import RoundSummary

ROOT = Path(__file__).parents[3]

Finished = Callable[..., Demo]
StartDemo = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def finished() -> Finished:
    """A finished demo with these accuracies of the averaged models, one list for each algorithm of the settings.

    Those of the latest models are a tenth of them.
    """

    def make(settings: DemoSettings, *accuracies: list[float]) -> Demo:
        results = [
            Result(
                method=settings.method(algorithm),
                parameters=settings.method(algorithm).parameters,
                rounds=tuple(rounds_of(_committed(number, value) for number, value in enumerate(values))),
                seconds=4.5,
            )
            for algorithm, values in zip(settings.algorithms, accuracies, strict=True)
        ]
        return Demo(settings, PartitionedData("every fifth", 360, ((10, 0), (3, 7))), results, 9.0, 20.0)

    return make


def _committed(number: int, accuracy: float) -> RoundSummary:
    metrics = {"averaged_accuracy": accuracy, "accuracy": accuracy / 10, "loss": 0.5}
    return RoundSummary(round=number, metrics=metrics, seconds=0.1, accepted=2, bytes_down=1024, bytes_up=512)


TEMPORARY = f"temporary-{'x' * 60}"
"""With this name no path of a socket fits into the folder."""


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[StartDemo]:
    """Starts `fl demo` in an empty folder, with its own folder for temporary files."""
    (tmp_path / TEMPORARY).mkdir()
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / TEMPORARY), "COLUMNS": "120"}
        process = subprocess.Popen(
            # -P, as with the installed script: modules are not searched in the current folder first.
            [sys.executable, "-P", "-m", "fl_ops", "demo", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
