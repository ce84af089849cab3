"""Devices with a folder of files each: the simulated run has the models of the networked one, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import SimulationConfig, SimulationSection
from fl_ops.simulate.simulation import Simulation
from fl_server.run_settings.spec import from_spec
from tests.processes.federation import Coordinator, Daemon, run_spec
from tests.processes.process import HERE, Workspace, write_toml

TASK = "folder_task:Files"
NAMES = ["berlin", "oslo", "rome"]
SECTIONS: dict[str, Any] = {"task": {"name": TASK}, "round": {"min_clients": 3}, "stop": {"rounds": 2}}


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folders of three devices in data/, with 8, 12 and 16 rows, in the current folder."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(NAMES):
        rows = torch.randn(8 + 4 * seed, 4, generator=torch.Generator().manual_seed(seed))
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True)
        (folder / "rows.txt").write_text("\n".join(" ".join(map(str, row)) for row in rows.tolist()))
    (tmp_path / "data" / "README").touch()
    return tmp_path / "data"


def simulated(section: dict[str, Any]) -> list[str | None]:
    """The digest of each round's model."""
    config = SimulationConfig(from_spec(run_spec("sites", **SECTIONS)), SimulationSection(**section))
    prepared = prepare(config, config.run.seed)
    with Simulation(prepared.config, prepared.clients, task=prepared.server_task) as made:
        return [done.digest for done in made.rounds()]


def test_folders_have_the_bits_of_the_networked_run(sites: Path, workspace: Workspace) -> None:
    """Three daemons with `[shard] folder`, and one line in [simulation]: every folder that is there is a client."""
    server = Coordinator(workspace, settings={"tasks": [TASK]}).serve()
    for name in NAMES:
        daemon = Daemon(workspace, server, name, shard={"folder": str(sites / name)})
        daemon.configure(task={"name": TASK})
        daemon.start()
    server.until_present(*NAMES)
    server.create("sites", **SECTIONS)
    server.completed("sites")
    assert simulated({"folders": "data/{name}"}) == server.digests("sites")


def test_the_command_trains_on_folders(sites: Path) -> None:
    """Its results have the three clients, and no partition."""
    run = {**SECTIONS, "local": {"learning_rate": 0.1}, "round": {"clients_per_round": 2, "min_accepted": 1}}
    write_toml(sites.parent / "run.toml", {**run, "simulation": {"folders": "data/{name}"}})
    done = CliRunner().invoke(app, ["simulate", "run.toml", "--out", "out"])
    assert done.exit_code == 0, done.output
    results = json.loads(next(Path("out").rglob("result.json")).read_text())
    assert "data/{name}" in json.dumps(results)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"folders": "data/{name}", "clients": 2, "names": "site-{index}"}, "found no data/site-0, data/site-1 in"),
        ({"folders": "nowhere/{name}"}, "expected folders that fit 'nowhere/{name}', found none in"),
        ({"folders": "data"}, 'expected a pattern with {name} once, such as "data/{name}"'),
        ({"folders": "data/{name}", "partition": {"method": "iid"}}, "partition selects from one training set"),
        ({}, "a simulation has simulation.folders"),
    ],
    ids=["missing", "no-folder", "no-name", "with-a-partition", "without"],
)
def test_what_does_not_fit_is_named(sites: Path, section: dict[str, Any], message: str) -> None:
    """The command states which folders are missing, and what a task with folders needs."""
    write_toml(sites.parent / "run.toml", {"task": {"name": TASK}, "stop": {"rounds": 1}, "simulation": section})
    done = CliRunner().invoke(app, ["simulate", "run.toml"])
    assert (done.exit_code != 0, message in " ".join(done.output.split())) == (True, True), done.output
