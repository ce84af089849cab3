"""Workers that share nothing with their coordinator but an object store, as on other machines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.federation import Fleet
from tests.processes.pods import is_ready
from tests.processes.process import Workspace, eventually
from tests.processes.relay import Relay
from tests.processes.workers import Worker, free_address, section
from tests.s3_server import S3Server

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")


@pytest.fixture(scope="module")
def fleet_on_objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator with workers and a folder as its object store, and three daemons."""
    store = tmp_path_factory.mktemp("objects")
    with Workspace(tmp_path_factory.mktemp("fleet")) as workspace:
        yield Fleet(workspace, 3, storage=f"file://{store}", objects={"retry_s": 0.5}, workers=section())


@pytest.fixture
def fleet(fleet_on_objects: Fleet) -> Iterator[Fleet]:
    """The fleet, idle and connected. No worker runs."""
    with fleet_on_objects.lent() as lent:
        yield lent


@pytest.fixture
def workspace(fleet: Fleet) -> Iterator[Workspace]:
    """For the workers of one test."""
    with Workspace(fleet.workspace.folder) as workspace:
        yield workspace


def elsewhere(fleet: Fleet, workspace: Workspace, name: str) -> Worker:
    """A worker with a state directory of its own."""
    return Worker(workspace, fleet.server, name, {"state_dir": str(workspace.folder / f"{name}-state")}).serve()


@pytest.mark.slow  # the test below has the same bits after a kill
def test_models_are_those_of_one_process(fleet: Fleet, workspace: Workspace, undisturbed: list[str]) -> None:
    """The coordinator reads the updates from the store, and removes what the workers put there."""
    workers = [elsewhere(fleet, workspace, f"away-{number}") for number in range(2)]
    assert undisturbed == fleet.server.digests(fleet.server.create("elsewhere"))
    assert any(list((worker.folder / f"{worker.name}-state").rglob("*.update")) for worker in workers)
    assert not list((Path(fleet.server.settings["state_dir"]) / "spool").rglob("*.update"))


def test_a_killed_coordinator_continues_with_what_the_workers_put(
    fleet: Fleet, workspace: Workspace, undisturbed: list[str]
) -> None:
    """The admitted update is in the store alone. Its client does not train again."""
    elsewhere(fleet, workspace, "kept")
    assert undisturbed == fleet.killed_in_mid_round("killed", "spool")


def test_a_worker_of_another_storage_is_refused(fleet: Fleet, workspace: Workspace) -> None:
    """Its bytes would be nowhere. It exits with 2 and the reason."""
    worker = Worker(workspace, fleet.server, "lost", {"storage": ""}).start()
    assert worker.wait() == 2
    assert "storage: expected the coordinator's own setting" in worker.errors()


@pytest.mark.slow
def test_clients_of_a_worker_without_its_store_go_to_another_one(
    tmp_path: Path, undisturbed: list[str], s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before `age_s` it closes its port, and opens it when it can reach the store again."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    serving, health = [free_address(), free_address()], [free_address(), free_address()]
    service = Relay(lambda: next((at for at, probe in zip(serving, health, strict=True) if is_ready(probe)), ""))
    with Workspace(tmp_path) as workspace, service, Relay(f"127.0.0.1:{s3.port}") as way:
        store = {"storage": f"s3://{s3.new_bucket()}/impetus", "objects": {"endpoint": s3.endpoint, "retry_s": 0.5}}
        fleet = Fleet(workspace, 3, workers=section(address=service.address), **store)
        workers = []
        for number, endpoint in enumerate((f"http://{way.address}", s3.endpoint)):
            settings = {
                "state_dir": str(tmp_path / f"worker-{number}-state"),
                "health_listen": health[number],
                "objects": {"endpoint": endpoint},
                "workers": {"serve": serving[number]},
            }
            workers.append(Worker(workspace, fleet.server, f"worker-{number}", settings).serve())
        _, slow = fleet.half_delivered("moves")
        way.cut()
        slow.hold.unlink()
        assert undisturbed == fleet.server.digests("moves")
        assert "check the network and objects.endpoint" in workers[0].logged("port_closed")["reason"]
        assert [is_ready(probe) for probe in health] == [False, True]
        way.heal()
        workers[0].logged("port_open")
        eventually(lambda: is_ready(health[0]), "it is ready again")
        assert not workers[1].events("port_closed")
