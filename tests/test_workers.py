"""Workers that are forks of the process that has collected the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = {
    "test_one.py": """
import os, pytest
@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    yield tmp_path_factory.mktemp("shared")
    print("the end of a session's fixture")
def test_first(shared): assert shared.is_dir()
def test_that_ends_its_process(): os._exit(3)
def test_after_it(shared): assert shared.is_dir()
""",
    "test_two.py": """
import pytest
def test_that_fails():
    print("what it printed")
    assert 1 == 2
def test_skipped(): pytest.skip("a reason")
""",
    "test_three.py": "def test_third(tmp_path): assert tmp_path.parent.name.startswith('worker')\n",
}


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of pytest with two workers on these files."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    options = ["-p", "tests.workers", "-p", "no:randomly", "-p", "no:cacheprovider", "--workers", "2", "-ra"]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(folder), *arguments, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_every_test_has_one_result(tmp_path: Path) -> None:
    """A test that ends its process is one failure, and the other tests of its file still run."""
    code, output = run(tmp_path)
    assert code == 1
    assert "2 failed, 3 passed, 1 skipped" in output, output
    assert "the process of this test ended with code 3" in output
    assert "what it printed" in output
    assert "a reason" in output


def test_the_first_failure_can_end_the_run(tmp_path: Path) -> None:
    """With `--exitfirst` the workers end, and the exit code is that of a failure."""
    code, output = run(tmp_path, "--exitfirst")
    assert code == 1
    assert "stopping after 1 failures" in output, output
