"""The page about the audit log: its verifier, which uses nothing of the project, and the tables of methods."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fl_common.audit.chains import a_chain

PAGE = (Path(__file__).parents[3] / "docs/security/audit.md").read_text()


def verify(folder: Path, export: str) -> subprocess.CompletedProcess[str]:
    """Run the page's program on an export."""
    program = re.search(r"```python\n# verify.py\n(.*?)```", PAGE, re.DOTALL)
    assert program
    (folder / "verify.py").write_text(program[1])
    (folder / "audit.jsonl").write_text(export)
    command = [sys.executable, "-I", "verify.py", "audit.jsonl"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", "intact, head 5:"),
        ('"actor":"operator:alice"', '"actor":"operator:bob"', "broken at line 1, row 1"),
    ],
)
def test_the_pages_verifier_finds_what_ours_does(tmp_path: Path, old: str, new: str, expected: str) -> None:
    """In plain Python, in a process without the project."""
    export = "".join(f"{row.to_json()}\n" for row in a_chain(5))
    done = verify(tmp_path, export.replace(old, new) if old else export)
    assert expected in done.stdout + done.stderr
    assert (done.returncode == 0) == ("intact" in expected)


def test_the_pages_verifier_finds_a_missing_row(tmp_path: Path) -> None:
    """The number of the line and of the row differ."""
    rows = a_chain(5)
    done = verify(tmp_path, "".join(f"{row.to_json()}\n" for row in (*rows[:2], *rows[3:])))
    assert "broken at line 3, row 4" in done.stderr


def test_the_page_has_every_row_of_the_device() -> None:
    """And no other one."""
    source = "".join(path.read_text() for path in (Path(__file__).parents[3] / "fl_client").rglob("*.py"))
    noted = set(re.findall(r'audit\.note\(\s*"(\w+)"', source)) | {"refused", "failed"}
    table = PAGE[PAGE.index("## The device's own log") :]
    assert noted <= set(re.findall(r"`(\w+)`", table))
