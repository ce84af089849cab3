"""docs/training/own-methods.md: its method, its reducer, its settings and its tests are used as a reader would."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from fl_client.settings.config import ClientConfig
from fl_extensions.methods import METHODS, REDUCERS
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import parse_simulation
from fl_ops.simulate.simulation import Simulation
from fl_server.settings.config import ServerConfig
from tests.processes.forks import Forked, Program
from tests.processes.process import TIMEOUT_S

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/training/own-methods.md").read_text(encoding="utf-8")
METHOD, REDUCER, PLUGIN, LAWS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SERVER, CLIENT, RUN, PACKAGE = (tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with the page's modules."""
    (tmp_path / "my_methods.py").write_text(METHOD, encoding="utf-8")
    (tmp_path / "my_reducers.py").write_text(REDUCER, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("my_methods", "my_reducers"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_the_method_and_the_reducer_satisfy_the_laws(folder: Path) -> None:
    """The page's two test files pass with its two modules."""
    (folder / "conftest.py").write_text(PLUGIN, encoding="utf-8")
    (folder / "test_laws.py").write_text(LAWS, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    program = Forked(Program("pytest", arguments, environment, folder, folder / "out", folder / "err"))
    code, printed = program.wait(TIMEOUT_S), (folder / "out").read_text()
    assert code == 0, printed
    assert "passed" in printed


def test_the_run_of_the_page_is_simulated(folder: Path) -> None:
    """The names and parameters of the run's file are those of the modules, and the held-out loss falls."""
    config = parse_simulation({**RUN, "stop": {"rounds": 2}, "simulation": {"clients": 4}})
    prepared = prepare(config, 0)
    with Simulation(prepared.config, prepared.clients, task=prepared.server_task) as simulation:
        losses = [done.metrics["loss"] for done in simulation.rounds()]
    assert losses[1] < losses[0]


def test_the_settings_of_the_page_have_the_names_of_the_run() -> None:
    """The lists of server and client are valid settings with the names of the run; so are the entry points."""
    server = ServerConfig(state_dir=Path("s"), insecure=True, **SERVER)
    plain = {"client_id": "a", "server": "127.0.0.1:1", "state_dir": "s", "insecure": True, "task": {"name": "digits"}}
    client = ClientConfig.model_validate({**plain, **CLIENT})
    method, reducer = RUN["algorithm"]["name"], RUN["round"]["reducer"]
    assert (server.algorithms, server.reducers, client.algorithms) == ([method], [reducer], [method])
    points = PACKAGE["project"]["entry-points"]
    assert (points[METHODS.group], points[REDUCERS.group]) == ({"slow-clients": method}, {"huber": reducer})
