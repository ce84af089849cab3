"""A copy of the tree in which made-up changes are made, and its code run."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import read_page

ROOT = Path(__file__).parents[3]
PACKAGES = (
    "protos",
    "fl_common",
    "algorithms",
    "fl_extensions",
    "fl_tasks",
    "fl_server",
    "fl_client",
    "fl_ops",
    "fl_web",
)


class ChangedCopy:
    """A copy of the packages and the tests. `files` are those that each change touched, by the change's name."""

    def __init__(self, folder: Path) -> None:
        self.files: dict[str, set[str]] = {}
        self.folder, self._change = folder, ""
        ignored = shutil.ignore_patterns("__pycache__", "images", "browser")
        for name in (*PACKAGES, "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)

    def begin(self, change: str) -> None:
        """What is put and added from now on belongs to this change."""
        self._change = change
        self.files[change] = set()

    def put(self, path: str, before: str, after: str) -> None:
        """Put one text in the place of another, which the file has exactly once."""
        text = (self.folder / path).read_text()
        assert text.count(before) == 1, f"{path} has {text.count(before)} times {before!r}"
        (self.folder / path).write_text(text.replace(before, after))
        self.files[self._change].add(path)

    def after(self, path: str, line: str, added: str) -> None:
        """Put a line after one that the file has exactly once."""
        self.put(path, line, line + added)

    def add(self, path: str, text: str) -> None:
        """Add a file."""
        (self.folder / path).write_text(text)
        self.files[self._change].add(re.sub(r"\w+\.py$", "NAME.py", path))

    def run(self, *arguments: str) -> str:
        """Run Python in the copy. Returns its output."""
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


def files_of_change(name: str) -> set[str]:
    """The files of a row of docs/development/changes.md."""
    row = re.search(rf"^\| {name} \| [^|]+ \| ([^|]+) \|", read_page("docs/development/changes.md"), re.MULTILINE)
    assert row, name
    return set(re.findall(r"`([^`]+)`", row[1]))
