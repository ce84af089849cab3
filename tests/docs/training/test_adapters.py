"""docs/training/adapters.md is executed with real processes, in the page's order, in an empty folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.docs.pages import follow_page, read_page

PAGE = read_page("docs/training/adapters.md")


@pytest.mark.slow
@pytest.mark.timeout(600)  # three programs and a run, on a machine that may be busy with others
def test_everything_on_the_page_works(tmp_path: Path) -> None:
    """Each file is saved and each command run; exit codes and outputs are those of the page."""
    follow_page(PAGE.replace("$ python3 ", f"$ {sys.executable} "), tmp_path / "work")


def test_no_block_of_the_page_is_left_out() -> None:
    """Each fenced block is a file or commands, so the test executes all of them."""
    kinds = [line for line in PAGE.splitlines() if line.startswith("```") and line != "```"]
    assert set(kinds) == {"```python", "```toml", "```console"}
