"""benchmarks/encodings: its lines of JSON and its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_program_measures_an_encoding() -> None:
    """Bytes and error of int8 are those that its definition gives: 260 bytes for 256 float32."""
    command = [sys.executable, "-m", "benchmarks.encodings", "--only", "int8", "--repeats", "1"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    options, result, *table = done.stdout.splitlines()
    assert json.loads(options)["repeats"] == 1
    measured = json.loads(result)
    assert measured["share"] == 0.2539
    assert 0.005 < measured["error_normal"] < 0.02
    assert measured["encode_cpu_gb_s"] > 0
    assert table[-1].startswith("| `int8` | 25.4 % |")


@pytest.mark.slow
def test_the_program_measures_the_differences_of_a_training() -> None:
    """Of the model and FedCM's direction, in every encoding; they are applied again, and the model's are smaller."""
    command = [sys.executable, "-m", "benchmarks.encodings.differences", "--task", "digits"]
    command += ["--rounds", "1", "--clients", "2", "--steps", "2"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    names = ["plain", "bf16", "int8", "int4", "int2"]
    assert [(each["bundle"], each["encoding"]) for each in found] == [
        (bundle, name) for bundle in ("model", "direction") for name in names
    ]
    assert all(0 < each["to_bundle"] < 0.9 for each in found[: len(names)])
    assert len([line for line in lines if line.startswith("| model |")]) == len(names)
