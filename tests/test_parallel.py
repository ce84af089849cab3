"""Tests in forked processes have their outcomes, whatever happens to a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
import pytest
from tests.parallel import pytest_addoption, pytest_runtestloop

@pytest.fixture(scope="session")
def made(tmp_path_factory):
    (tmp_path_factory.getbasetemp() / "made").touch(exist_ok=False)
    yield
    (tmp_path_factory.getbasetemp() / "ended").touch()
"""
TESTS = """
import os, signal, threading, pytest

def test_that_passes(made):
    pass

def test_that_fails(made):
    print("said before")
    assert os.getpid() == 0

def test_that_kills_its_process(made):
    os.kill(os.getpid(), signal.SIGKILL)

def test_after_the_kill(made):
    pass

@pytest.mark.timeout(0.5)
def test_that_hangs():
    threading.Event().wait()

@pytest.mark.skip(reason="a reason")
def test_that_is_skipped():
    pass
"""


def run(folder: Path, *arguments: str) -> list[str]:
    """The lines of pytest's output for two files of the same tests, in two processes."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name in ("test_one.py", "test_two.py"):
        (folder / name).write_text(TESTS)
    options = ["--workers", "2", "-ra", "--import-mode=importlib", "--basetemp", str(folder / "base"), *arguments]
    others = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:asyncio"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *others, str(folder)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_each_test_has_its_outcome(tmp_path: Path) -> None:
    """A killed process fails its own test, and the rest of its file is run by another one."""
    lines = run(tmp_path)
    assert "6 failed, 4 passed, 2 skipped" in lines[-1]
    failed = {line for line in lines if line.startswith("FAILED")}
    assert len(failed) == 6
    for name in ("test_one.py", "test_two.py"):
        assert any(f"{name}::test_that_fails - assert" in line for line in failed)
        killed = f"{name}::test_that_kills_its_process - the process that ran this test ended with exit code -9"
        assert any(killed in line for line in failed)
        assert any(f"{name}::test_that_hangs - Failed: Timeout" in line for line in failed)
    assert lines.count("said before") == 2


def test_a_session_has_its_fixtures_once_in_each_process(tmp_path: Path) -> None:
    """They end with the process, also when a failure stops all of them."""
    lines = run(tmp_path, "--maxfail=1", "-k", "not kills")
    assert any("stopping after" in line for line in lines)
    assert any((tmp_path / "base").glob("worker-*/made"))
    for made in (tmp_path / "base").glob("worker-*/made"):
        assert made.with_name("ended").exists()
