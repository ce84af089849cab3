"""docs/simulation/python.md: its code runs, block after block, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

import algorithms
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs/simulation/python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_the_code_prints_what_the_page_shows() -> None:
    """All blocks in order, in one namespace."""
    assert len(BLOCKS) == PAGE.count("```python") == 4
    names: dict[str, object] = {"__name__": "page"}
    for code, shown in BLOCKS:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "docs/simulation/python.md", "exec"), names)  # noqa: S102 - the repository's own page
        assert printed.getvalue() == shown


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bfl\.(\w+)", PAGE))))
def test_every_name_is_public(name: str) -> None:
    """The page uses exported names only."""
    assert name in algorithms.__all__
