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
