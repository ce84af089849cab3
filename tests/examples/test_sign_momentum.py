"""The package of examples/sign-momentum, installed into an environment of its own, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import ROOT, Workspace

SOURCE = ROOT / "examples" / "sign-momentum"


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the package, and with this one's packages below it."""

    folder: Path

    @property
    def site(self) -> Path:
        """Its folder of installed packages."""
        return Path(sysconfig.get_path("purelib", "venv", {"base": str(self.folder)}))

    def run(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run its Python. The project is importable, as if it were installed."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PIP_NO_INDEX": "1"}
        command = [str(self.folder / "bin" / "python"), *arguments]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The package is installed by pip from a copy of its sources."""
    folder = tmp_path_factory.mktemp("sign-momentum")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    venv.create(folder / "venv", system_site_packages=True, with_pip=False)
    made = Environment(folder / "venv")
    # The packages of the environment in which the tests run: torch, setuptools and pip among them.
    (made.site / "tests-environment.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", str(folder / "source"))
    done = made.run(*install, cwd=folder)
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.slow
def test_its_own_tests_pass(environment: Environment, tmp_path: Path) -> None:
    """With the installed package, from another folder: the laws of methods and reducers, and rounds by hand."""
    shutil.copytree(SOURCE / "tests", tmp_path / "tests")
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
    where = environment.run("-c", "import sign_momentum; print(sign_momentum.__file__)", cwd=tmp_path)
    assert Path(where.stdout.strip()).is_relative_to(environment.site)


@pytest.mark.slow
def test_its_run_is_simulated_by_the_names_of_its_entry_points(environment: Environment, tmp_path: Path) -> None:
    """The run's file of the package works as the README shows it, and the accuracy is above chance."""
    text = (SOURCE / "run.toml").read_text().replace("rounds = 20", "rounds = 12")
    (tmp_path / "run.toml").write_text(text)
    done = environment.run("-m", "fl_ops", "simulate", "run.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "12 rounds are done" in done.stdout


@pytest.mark.slow
def test_its_names_need_no_settings(environment: Environment, workspace: Workspace) -> None:
    """Coordinator and daemons with the package take part in its run, with the same code on both sides."""
    server = Coordinator(workspace, settings={"tasks": []}, path=[environment.site]).serve()
    for index in range(4):
        shard = {"partition": {"method": "iid", "clients": 4, "seed": 1}, "index": index}
        settings = {"task": {"name": "rings"}, "shard": shard}
        Daemon(workspace, server, f"edge-{index}", path=[environment.site], **settings).start()
    server.create(
        "rings",
        task={"name": "rings"},
        algorithm={"name": "sign-momentum", "parameters": {"alpha": 0.3}},
        round={"clients_per_round": 4, "min_clients": 4, "quorum": 4, "reducer": "weighted-median"},
        stop={"rounds": 2},
    )
    server.completed("rings")
    offers = {offer.name: offer.fingerprint for offer in server.client("edge-0").methods}
    assert list(offers) == ["sign-momentum"]
    assert server.run("rings").spec.algorithm.fingerprint == offers["sign-momentum"]
