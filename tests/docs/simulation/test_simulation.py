"""docs/simulation/simulation.md: its file is valid, and its table is the table [simulation]."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fl_ops.simulate.output.results import SeedResult
from fl_ops.simulate.seeds import Job, Report, simulate
from fl_ops.simulate.settings import SimulationSection, parse_simulation
from fl_ops.simulate.system.section import SystemSection

PAGE = (Path(__file__).parents[3] / "docs/simulation/simulation.md").read_text()


def test_the_file_of_the_page() -> None:
    """It is a run with twenty clients."""
    found = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert found
    config = parse_simulation(tomllib.loads(found[1]))
    assert (config.simulation.clients, config.run.round.clients_per_round) == (20, 4)


def test_every_key_is_documented() -> None:
    """Each key of [simulation] has its row, with its default; each of [simulation.system] has a row."""
    of_system, page = PAGE.split("## Simulated time")[1], PAGE.split("## Seeds, files")[0]
    defaults = {name: field.default for name, field in SimulationSection.model_fields.items()}
    rows = dict(re.findall(r"^\| `(\w+)` \| `?(.*?)`? \|", page, re.MULTILINE))
    documented = {name: None if text == "none" else tomllib.loads(f"it = {text}")["it"] for name, text in rows.items()}
    assert documented == defaults
    firsts = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", of_system, re.MULTILINE)
    assert re.findall(r"\w+", " ".join(firsts)) == [*SystemSection.model_fields]


def test_the_devices_of_the_page() -> None:
    """The section of the example, and each form of a quantity, are valid."""
    blocks = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert tomllib.loads(blocks[1])["simulation"]["system"]["speed"]["median"] == 50
    parse_simulation({"task": {"name": "digits"}, **tomllib.loads(blocks[1])})
    for line in blocks[2].splitlines():
        SystemSection.model_validate(tomllib.loads(line))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_run_of_the_page_learns() -> None:
    """Its twenty rounds end far above the ten percent of a guess."""
    found = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert found
    reports: list[Report] = []
    simulate(Job(parse_simulation(tomllib.loads(found[1])), 0, None), reports.append)
    result = reports[-1]
    assert isinstance(result, SeedResult)
    assert result.rounds[-1].metrics["accuracy"] > 0.85
