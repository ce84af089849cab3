"""docs/simulation/cluster.md: its Slurm script and its Job's command run on two loopback nodes; the Job is valid."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_ops.simulate.output.results import RESULT, SeedResult
from fl_ops.simulate.seeds import Job, Report, simulate
from fl_ops.simulate.settings import read_simulation
from tests.fl_ops.simulate.ranks.launch import TORCHRUN, Launches
from tests.k8s.objects import Object, title
from tests.k8s.pod_checks import images_are_pinned, pods_are_restricted
from tests.k8s.reference_checks import volumes_are_there
from tests.k8s.schemas.validation import NEWEST, OLDEST, refusal

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/simulation/cluster.md").read_text()
PORT = "29500"

FILE = """
[task]
name = "tests.fl_ops.points:Points"
[algorithm]
name = "scaffold"
[local]
learning_rate = 0.2
[round]
clients_per_round = 3
[stop]
rounds = 3
[simulation]
clients = 5
"""

SRUN = """#!/bin/sh
# Starts the command once for each node.
"$@" & first=$!
"$@" & wait $first && wait $!
"""
COMMANDS = {
    "srun": SRUN,
    "scontrol": "#!/bin/sh\necho 127.0.0.1\necho 127.0.0.2\n",
    "torchrun": f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n',
}


def block(language: str) -> str:
    """The page's block in a language."""
    found: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1
    return found[0]


def manifest() -> list[dict[str, Any]]:
    """The objects of the page."""
    return list(yaml.safe_load_all(block("yaml")))


def free_port() -> str:
    """A port that nothing listens on."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The run's file."""
    path = tmp_path / "config.toml"
    path.write_text(FILE)
    return path


def digests(config: Path) -> list[str | None]:
    """The models of the run in one process."""
    reports: list[Report] = []
    simulate(Job(read_simulation(config), 0, None), reports.append)
    result = reports[-1]
    assert isinstance(result, SeedResult)
    return [done.digest for done in result.rounds]


def written(folder: Path) -> list[str]:
    """The models of a run with --out."""
    return [done["digest"] for done in json.loads((folder / "seed-0" / RESULT).read_text())["rounds"]]


@pytest.mark.slow
def test_the_script_for_slurm(config: Path, tmp_path: Path) -> None:
    """Two nodes find each other by the script's rendezvous, and have the models of one process.

    The commands of Slurm are stand-ins, which start a process for each node here.
    """
    folder = tmp_path / "commands"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    assert block("sh").count(PORT) == 1
    (tmp_path / "script").write_text(block("sh").replace(PORT, free_port()))
    nodes = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    with Launches() as launches:
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        done = launches.start(tmp_path, "bash", "-e", "script", variables={**nodes, "PATH": path})
        output, errors = done.communicate(timeout=200)
        assert done.returncode == 0, errors
    assert "2 ranks" in output
    assert written(tmp_path / "results") == digests(config)


@pytest.mark.slow
def test_the_command_of_the_job(config: Path, tmp_path: Path) -> None:
    """Two pods with the numbers 0 and 1 have the models of one process. Only addresses, folders and sizes differ."""
    (container,) = manifest()[1]["spec"]["template"]["spec"]["containers"]
    here = {
        "--nnodes=4": "--nnodes=2",
        "--master-addr=simulation-0.simulation": "--master-addr=127.0.0.1",
        f"--master-port={PORT}": f"--master-port={free_port()}",
        "/config/config.toml": str(config),
        "--out=/results": f"--out={tmp_path / 'results'}",
    }
    assert container["command"] == ["torchrun"]
    assert here.keys() <= {*container["args"]}
    arguments = [here.get(argument, argument) for argument in container["args"]]
    with Launches() as launches:
        pods = [
            launches.start(
                tmp_path, *TORCHRUN, *(argument.replace("$(JOB_COMPLETION_INDEX)", pod) for argument in arguments)
            )
            for pod in "01"
        ]
        for pod in pods:
            _, errors = pod.communicate(timeout=200)
            assert pod.returncode == 0, errors
    assert written(tmp_path / "results") == digests(config)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_manifest_fits_its_schemas(version: str) -> None:
    """No unknown field, none missing, none of another type."""
    assert {title(built): refusal(built, version) for built in manifest()} == {
        "Service/simulation": None,
        "Job/simulation": None,
    }


@pytest.mark.parametrize("check", [pods_are_restricted, images_are_pinned, volumes_are_there])
def test_the_job_fits_the_checks_of_pods(check: Callable[[Sequence[Object]], Iterator[str]]) -> None:
    """It runs where Pod Security's level "restricted" is enforced, with pinned images, and mounts what it has."""
    assert list(check(manifest())) == []


def test_the_job_fits_its_service() -> None:
    """The first pod's address follows from names; the service selects the label that each pod of a Job has."""
    service, job = manifest()
    pod, ranks = job["spec"]["template"]["spec"], job["spec"]["completions"]
    name, where = job["metadata"]["name"], service["metadata"]["name"]
    assert service["spec"] == {"clusterIP": "None", "selector": {"job-name": name}}
    assert (pod["subdomain"], job["spec"]["parallelism"], job["spec"]["completionMode"]) == (where, ranks, "Indexed")
    assert {f"--nnodes={ranks}", f"--master-addr={name}-0.{where}"} <= {*pod["containers"][0]["args"]}
