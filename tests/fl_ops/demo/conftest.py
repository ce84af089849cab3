"""Results made by hand, and the real command as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fl_ops.demo.dealing import Dealt
from fl_ops.demo.facts import Demo
from fl_ops.demo.results import Result, Round
from fl_ops.demo.settings import DemoSettings

ROOT = Path(__file__).parents[3]

Finished = Callable[..., Demo]


@pytest.fixture
def finished() -> Finished:
    """A demo that came to these accuracies, one list for each algorithm of the settings."""

    def make(settings: DemoSettings, *accuracies: list[float]) -> Demo:
        results = [
            Result(
                method=settings.method(algorithm),
                parameters=settings.method(algorithm).parameters,
                rounds=tuple(Round(number, value, 0.5, 0.1, 2, 1024, 512) for number, value in enumerate(values)),
                seconds=4.5,
            )
            for algorithm, values in zip(settings.algorithms, accuracies, strict=True)
        ]
        return Demo(settings, Dealt("every fifth", 360, ((10, 0), (3, 7))), results, 9.0, 20.0)

    return make


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `fl demo` in an empty folder; what it leaves in its place for temporary files can be looked at."""
    (tmp_path / "temporary").mkdir()
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "temporary"), "COLUMNS": "120"}
        process = subprocess.Popen(
            # As the installed script: this folder is not where modules are looked for first.
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
