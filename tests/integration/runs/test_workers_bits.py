"""Runs of every form of update through workers: the bits of the simulation, which has no network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes.federation import Coordinator, Daemon, Fleet
from tests.processes.process import HERE, Workspace
from tests.processes.simulated import simulated_digests
from tests.processes.workers import Worker, section

RUNS: dict[str, dict[str, Any]] = {
    "scaffold": {"algorithm": {"name": "scaffold"}, "population": 3, "round": {"clip_update_norm": 0.1}},
    "two-exchanges": {"algorithm": {"name": "mime"}, "encodings": {"update": "eden2", "model": "eden4"}},
    "encoded": {"encodings": {"update": "int8", "model": "bf16"}, "round": {"clip_update_norm": 0.1}},
    "sparse": {"encodings": {"update": "topk", "fraction": 0.25}, "algorithm": {"name": "fedavg"}},
    "reference": {"encodings": {"update": "int2", "reference": "direction"}},
    "differences": {"encodings": {"model": "bf16", "difference": "previous"}, "round": {"clients_per_round": 3}},
    "evaluated": {"evaluation": {"clients_every": 1}},
}


@pytest.fixture(autouse=True)
def _task_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the daemons' task importable here."""
    monkeypatch.syspath_prepend(HERE)


@pytest.fixture(scope="module")
def fleet_with_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator with two workers, and three daemons."""
    with Workspace(tmp_path_factory.mktemp("fleet")) as workspace:
        fleet = Fleet(workspace, 3, workers=section())
        for number in range(2):
            Worker(workspace, fleet.server, f"worker-{number}").serve()
        yield fleet


@pytest.mark.slow  # operation/test_workers has the bits of a run through a worker
@pytest.mark.parametrize("name", RUNS)
def test_every_form_of_update_has_the_simulated_bits(fleet_with_workers: Fleet, name: str) -> None:
    """Norms, clip factors and models are the same."""
    sections = {**RUNS[name], "stop": {"rounds": 2}}
    run = fleet_with_workers.server.create(f"workers-{name}", **sections)
    assert fleet_with_workers.server.digests(run) == simulated_digests(run, **sections)


@pytest.mark.slow  # test_simulation has buffers without workers
def test_buffers_have_the_simulated_bits(tmp_path: Path) -> None:
    """A worker sends the values of the buffers, which the coordinator checks."""
    options = {"model": "batchnorm"}
    with Workspace(tmp_path) as workspace:
        server = Coordinator(workspace, settings={"workers": section()}).serve()
        Worker(workspace, server, "worker").serve()
        for index in range(3):
            shard = {"partition": {"method": "iid", "clients": 3, "seed": 1}, "index": index}
            Daemon(workspace, server, f"edge-{index}", options=options, shard=shard).start()
        sections = {"task": {"options": options}, "stop": {"rounds": 2}, "round": {"max_relative_payload": 5.0}}
        server.create("buffers", **sections)
        assert server.digests("buffers") == simulated_digests("buffers", **sections)
