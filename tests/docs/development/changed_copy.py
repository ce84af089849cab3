"""A copy of the tree in which a made-up change is made, and its code run."""

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
    """A copy of the packages and the tests. `files` are those that were changed."""

    def __init__(self, folder: Path) -> None:
        self.files: set[str] = set()
        self._folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "images", "browser")
        for name in (*PACKAGES, "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)

    def put(self, path: str, before: str, after: str, *, part_of_change: bool = True) -> None:
        """Put one text in the place of another, which the file has exactly once."""
        text = (self._folder / path).read_text()
        assert text.count(before) == 1, f"{path} has {text.count(before)} times {before!r}"
        (self._folder / path).write_text(text.replace(before, after))
        if part_of_change:
            self.files.add(path)

    def add(self, path: str, text: str) -> None:
        """Add a file."""
        (self._folder / path).write_text(text)
        self.files.add(re.sub(r"\w+\.py$", "NAME.py", path))

    def run(self, *arguments: str) -> str:
        """Run Python in the copy. Returns its output."""
        done = subprocess.run(
            [sys.executable, *arguments], cwd=self._folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout


def files_of_change(name: str) -> set[str]:
    """The files of a row of docs/development/changes.md."""
    row = re.search(rf"^\| {name} \| [^|]+ \| ([^|]+) \|", read_page("docs/development/changes.md"), re.MULTILINE)
    assert row, name
    return set(re.findall(r"`([^`]+)`", row[1]))
