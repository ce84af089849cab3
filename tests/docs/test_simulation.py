"""docs/simulation.md: its file is one, and its table is the table [simulation]."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from fl_ops.simulate.settings import SimulationSection, parse_plan

PAGE = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()


def test_the_file_of_the_page():
    """It is a run with twenty clients."""
    plan = parse_plan(tomllib.loads(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1]))
    assert (plan.simulation.clients, plan.config.round.clients_per_round) == (20, 4)


def test_every_key_is_told():
    """Each key of [simulation] has its row, with its default."""
    defaults = {name: field.default for name, field in SimulationSection.model_fields.items()}
    rows = dict(re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", PAGE, re.MULTILINE))
    told = {name: tomllib.loads(f"it = {text}")["it"] for name, text in rows.items()}
    assert told == defaults
