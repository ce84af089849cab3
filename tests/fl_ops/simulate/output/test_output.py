"""The live line, the plot and the profile of simulated runs."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from fl_ops.simulate.output import console
from fl_ops.simulate.output.results import PLOT, draw
from fl_ops.simulate.reports import OTHER, PARTS
from fl_ops.simulate.seeds import Job
from fl_ops.simulate.settings import parse_simulation
from tests.fl_ops.simulate.conftest import MakeTable
from tests.marks import slow_except


def jobs_of(table: MakeTable, seeds: int = 1, **sections: object) -> list[Job]:
    """Runs without files."""
    return [Job(parse_simulation(table(**sections)), seed, None) for seed in range(seeds)]


def test_the_live_line_has_value_rate_and_time_left(table: MakeTable) -> None:
    """From the second round on. The first round has neither rate nor time."""
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, width=160, legacy_windows=False)
    console.simulate(jobs_of(table), 1, terminal)
    assert re.search(r"seed 0  round 0 of 3: client 1 of 2 ", screen.getvalue())
    line = re.search(
        r"round 2 of 3: client 1 of 2, held-out loss ([\d.]+), ([\d.e+]+) clients/s, (.*?) left", screen.getvalue()
    )
    assert line
    assert f"held-out loss {line[1]}" in screen.getvalue().split("round 1: ")[1]


@pytest.mark.parametrize("seeds", slow_except([1, 3], 3))
def test_the_plot_is_a_picture(table: MakeTable, tmp_path: Path, seeds: int) -> None:
    """A PNG with something drawn in each seed's colour; no file for runs without evaluations."""
    quiet = Console(file=io.StringIO())
    assert draw(console.simulate(jobs_of(table, seeds), 1, quiet), tmp_path / PLOT)
    assert (tmp_path / PLOT).read_bytes().startswith(b"\x89PNG")
    nothing = console.simulate(jobs_of(table, seeds, evaluation={"every": 0}), 1, quiet)
    assert not draw(nothing, tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()


def test_the_parts_of_the_profile_are_the_runs_time(table: MakeTable) -> None:
    """Every part is there, none is negative, and together they are about the time of all rounds."""
    [result] = console.simulate(jobs_of(table), 1, Console(file=io.StringIO()))
    assert set(result.profile) == {*PARTS.values(), OTHER}
    assert min(result.profile.values()) >= 0
    assert result.profile[PARTS["clients"]] > 0
    assert sum(result.profile.values()) >= sum(done.seconds for done in result.rounds)


def test_profile_and_plot_of_the_command(table: MakeTable, tmp_path: Path) -> None:
    """`--profile` prints the parts, `--out` has the plot, and result.json has the seconds."""
    config = tmp_path / "run.toml"
    config.write_text(
        '[task]\nname = "points:Points"\n[local]\nlearning_rate = 0.2\n[round]\nclients_per_round = 2\n'
        "[stop]\nrounds = 2\n[simulation]\nclients = 4\n"
    )
    result = CliRunner().invoke(app, ["simulate", str(config), "--out", str(tmp_path / "out"), "--profile"])
    assert result.exit_code == 0, result.output
    assert "waiting for clients' updates" in result.output
    assert (tmp_path / "out" / PLOT).exists()
    facts = json.loads((tmp_path / "out" / "seed-0" / "result.json").read_text())
    assert facts["profile"].keys() == {*PARTS.values(), OTHER}
