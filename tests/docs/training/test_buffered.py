"""docs/training/buffered.md: its settings are read, its rule is one, and its tables are those of the program."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import algorithms as fl
from algorithms.buffered import refusal
from fl_server.aggregation.server_update import staleness_rule
from fl_server.run_settings.spec import from_values

PAGE = (Path(__file__).parents[3] / "docs/training/buffered.md").read_text(encoding="utf-8")


def test_the_settings_of_the_page_are_read() -> None:
    """Those that it calls defaults are the defaults."""
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    section = tomllib.loads(text)["round"]
    config = from_values({"task": {"name": "digits"}, "round": section})
    assert (config.round.goal, config.round.concurrency) == (10, 30)
    defaults = from_values({"task": {"name": "digits"}, "round": {"close": "buffer", "goal": 10, "concurrency": 30}})
    assert staleness_rule(config).weights(range(9)) == staleness_rule(defaults).weights(range(9))
    assert config.round.max_staleness == defaults.round.max_staleness


def test_the_rule_of_the_page_is_one() -> None:
    """It halves the weight with each version."""
    [text] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {"__name__": "page_of_buffers"}
    exec(compile(text, "page", "exec", dont_inherit=True), names)  # noqa: S102 - the page of this repository
    fl.add_staleness("page:halving", names["halving"])  # type: ignore[arg-type]
    assert fl.build_staleness("page:halving").weights([0, 1, 2]) == (1.0, 0.5, 0.25)


def test_every_built_in_rule_is_on_the_page() -> None:
    """Each by its name in quotes."""
    assert set(re.findall(r'^\| `"(\w+)"` \|', PAGE, re.MULTILINE)) == set(fl.BUILT_IN_STALENESS)


@pytest.mark.parametrize("name", sorted(name for name in fl.names() if refusal(fl.build(name))))
def test_every_refused_method_is_on_the_page(name: str) -> None:
    """In the table of what a buffer excludes."""
    table = PAGE[PAGE.index("## What it excludes") :].lower()
    assert re.search(rf"\b{name}\b", table)
