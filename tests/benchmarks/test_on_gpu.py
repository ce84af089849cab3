"""benchmarks/on_gpu.sh: a step is bounded, its result is kept, and it is not repeated. With a stub interpreter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "on_gpu.sh"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs the step "tests" with an interpreter whose `-m pytest` is the shell code given; all else succeeds."""

    def make(pytest_code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        stub = tmp_path / "python"
        stub.write_text(f'#!/bin/sh\ncase "$*" in *pytest*) {pytest_code} ;; esac\n', encoding="utf-8")
        stub.chmod(0o755)
        variables = {"PYTHON": str(stub), "RESULTS": str(tmp_path / "results"), "STEPS": "tests", **environment}
        return subprocess.run(
            [SCRIPT], env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False
        )

    return make


def test_a_finished_step_is_not_repeated(run: Run, tmp_path: Path) -> None:
    """The second start keeps the first one's output."""
    assert run("echo first").returncode == 0
    again = run("echo second; exit 1")
    assert again.returncode == 0
    assert "tests: done before" in again.stdout
    assert (tmp_path / "results" / "tests.log").read_text() == "first\n"


def test_a_failed_step_is_reported_and_made_again(run: Run, tmp_path: Path) -> None:
    """The first start ends with 1 and keeps the exit code; the second start repairs it."""
    assert run("exit 3").returncode == 1
    assert (tmp_path / "results" / "tests.failed").read_text() == "3\n"
    assert run("true").returncode == 0
    assert sorted(each.name for each in (tmp_path / "results").glob("tests.*")) == ["tests.done", "tests.log"]


def test_unfinished_work_goes_on_the_next_time(run: Run, tmp_path: Path) -> None:
    """Exit code 8 of `fl compare --minutes` is neither a result nor a failure."""
    ended = run("exit 8")
    assert ended.returncode == 0
    assert "tests: goes on the next time" in ended.stdout
    assert [each.name for each in (tmp_path / "results").glob("tests.*")] == ["tests.log"]


def test_no_step_begins_without_time(run: Run, tmp_path: Path) -> None:
    """With MINUTES=0 nothing runs."""
    assert "tests: no time left" in run("echo ran", MINUTES="0").stdout
    assert not (tmp_path / "results" / "tests.log").exists()


def test_each_result_is_kept_in_one_file_from_which_another_machine_goes_on(run: Run, tmp_path: Path) -> None:
    """The archive has the finished step; a start with it in an empty folder does not repeat the step."""
    archive, other = tmp_path / "results.tar.gz", tmp_path / "other"
    assert run("echo first", ARCHIVE=str(archive)).returncode == 0
    again = run("exit 1", BEFORE=str(archive), RESULTS=str(other))
    assert (again.returncode, "tests: done before" in again.stdout) == (0, True)
    assert (other / "tests.log").read_text() == "first\n"


def test_data_come_in_parts(run: Run, tmp_path: Path) -> None:
    """The parts of one archive are put together, and the steps read the folder."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "batch").write_text("images" * 1000)
    subprocess.run(["tar", "-cf", tmp_path / "all.tar", "-C", tmp_path / "data", "."], check=True)
    whole = (tmp_path / "all.tar").read_bytes()
    parts = [tmp_path / "part-0", tmp_path / "part-1"]
    for part, data in zip(parts, (whole[:1000], whole[1000:]), strict=True):
        part.write_bytes(data)
    assert run('cat "$IMPETUS_DATA/batch"', DATA_PARTS=" ".join(map(str, parts))).returncode == 0
    assert (tmp_path / "results" / "tests.log").read_text() == "images" * 1000
