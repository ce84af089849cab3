"""The language of docstrings: what has no subject is a riddle where the name is out of sight."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = (
    "algorithms", "fl_client", "fl_common", "fl_extensions", "fl_ops", "fl_server", "fl_tasks", "fl_web", "protos",
)  # fmt: skip
WITHOUT_SUBJECT = re.compile(r'\s*"""(As|By|From|In|Of|On|Over|To|Until)[ :]')
"""Docstrings such as "Of the newest round." or "As JSON."."""


def test_docstrings_have_a_subject() -> None:
    """No docstring of the product begins with a preposition that leaves its subject to the reader."""
    paths = [path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))]
    fragments = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if WITHOUT_SUBJECT.match(line)
    ]
    assert not fragments, "\n".join(["expected docstrings with a subject, got:", *fragments])
