"""The tests of a worker share one coordinator, and a run's name is never used again: each file has names of its own."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

_NAME = re.compile(r'(?:\.create|half_delivered)\(\s*"([^"]+)"')


def test_no_two_files_use_one_name() -> None:
    """Files run on one worker or on several, in any order."""
    files = defaultdict(set)
    for file in Path(__file__).parents[1].rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        if "fleet: Fleet" in text and "def fleet(" not in text:
            for name in _NAME.findall(text):
                files[name].add(file.name)
    assert len(files) > 30
    assert {name: sorted(users) for name, users in files.items() if len(users) > 1} == {}
