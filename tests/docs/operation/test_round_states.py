"""docs/development/round-states.md is up to date with the round state machine."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from fl_server.rounds.machine import RULES

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names of the script, without running its last line."""
    return runpy.run_path(str(DOCS / "source" / "round_states.py"))


def test_the_page_is_up_to_date(script: dict[str, Any]) -> None:
    """Run `python -m docs.source.round_states` after a change of the rules, and read what it changed."""
    assert (DOCS / "development/round-states.md").read_text(encoding="utf-8") == script["page"]()


def test_the_page_leaves_no_rule_out(script: dict[str, Any]) -> None:
    """The runs that the script tries use every rule of the table, and nothing else happens."""
    assert {(phase, name) for phase, name, _ in script["transitions"]()} == {(p, kind.__name__) for p, kind in RULES}
