"""A kill after, and in the middle of, every write of a round with secure aggregation, or with privacy of records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(7200)  # every write of a process: twenty minutes on busy cores
@pytest.mark.parametrize(
    "arguments",
    [
        ("--who", "server", "--every", "150", "--abandoned"),
        *(
            pytest.param(arguments, marks=pytest.mark.slow)
            for arguments in (
                ("--who", "c-0", "--every", "30"),
                ("--who", "server"), ("--who", "c-0"), ("--who", "server", "--abandoned"),
                ("--who", "c-5", "--abandoned"), ("--who", "server", "--records"), ("--who", "c-0", "--records"),
            )
        ),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_kill_at_any_write_changes_no_bit(arguments: tuple[str, ...]) -> None:
    """The model is the same, and so is the number of draws: an abandoned one is not drawn under its number again."""
    program = [sys.executable, "-m", "tests.deterministic.every_kill", *arguments]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["wrong"], done.returncode) == ({}, 0)
    assert summary["lives"] >= 2
