"""Workers of two coordinators: they follow the one that leads, and what they have acknowledged counts there."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from tests.postgres_server import PostgresServer
from tests.processes.process import Workspace, eventually
from tests.processes.standby import NAMES, Pair
from tests.processes.workers import Worker, free_address
from tests.s3_server import S3Server

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")
pytestmark = pytest.mark.slow


class PairWithWorkers(Pair):
    """Two coordinators, two workers with state directories of their own, and daemons that know both coordinators."""

    def __init__(self, workspace: Workspace, size: int, ledger: str, storage: str, endpoint: str = "") -> None:
        serve, listen = free_address(), {name: free_address() for name in NAMES}
        objects = {"retry_s": 0.5, **({"endpoint": endpoint} if endpoint else {})}
        own = {name: {"workers": {"listen": listen[name], "serve": serve}} for name in NAMES}
        super().__init__(workspace, size, own, ledger=ledger, storage=storage, objects=objects)
        known = {"listen": listen["one"], "standbys": [listen["two"]], "serve": serve}
        self.workers = [
            Worker(
                workspace,
                self.candidates["one"],
                f"worker-{number}",
                {"state_dir": str(workspace.folder / f"worker-{number}-state"), "workers": known},
            ).serve()
            for number in range(2)
        ]


@pytest.fixture(scope="module", params=["folder", "s3"])
def shared_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgres: PostgresServer
) -> Iterator[PairWithWorkers]:
    """The processes of this file's tests, with a folder and with a real S3 server as the object store."""
    with Workspace(tmp_path_factory.mktemp("pair")) as workspace, pytest.MonkeyPatch.context() as patch:
        store = [f"file://{tmp_path_factory.mktemp('objects')}"]
        if request.param == "s3":
            s3: S3Server = request.getfixturevalue("s3")
            for name, value in s3.environment.items():
                patch.setenv(name, value)
            store = [f"s3://{s3.new_bucket()}/impetus", s3.endpoint]
        yield PairWithWorkers(workspace, 3, postgres.new_ledger(), *store)


@pytest.fixture
def pair(shared_pair: PairWithWorkers) -> Iterator[PairWithWorkers]:
    """The pair with a leader, a standby, its workers and idle daemons."""
    with shared_pair.lent() as lent:
        if lent.standby.exit_code is not None:
            lent.standby.stand_by()
        yield lent


def test_workers_follow_the_leader(pair: PairWithWorkers, undisturbed: list[str]) -> None:
    """The leader is killed in a round with one of two updates admitted: it counts, and no bit differs."""
    quick, slow = pair.half_delivered("followed")
    attached = [len(worker.events("attached")) for worker in pair.workers]
    pair.server.kill()
    pair.taken_over()
    for worker, before in zip(pair.workers, attached, strict=True):
        worker.logged("attached", before + 1)
    status = pair.server.run("followed")
    assert (status.rounds_done, status.admitted) == (0, 1)
    slow.hold.unlink()
    assert undisturbed == pair.server.digests("followed")
    assert len(quick.events("trained", run="followed", round=0)) == 1
    assert not [line for line in pair.server.events("rpc_refused") if line.get("rpc") == "ReceiveUpdate"]


@pytest.mark.timeout(600)
def test_leaders_are_killed_again_and_again(pair: PairWithWorkers, undisturbed: list[str]) -> None:
    """At any moment of ten runs, uploads through workers included. No acknowledged update is trained again."""
    chance = random.Random(11)
    for number in range(10):
        run = pair.server.create(f"mortal-{number}")
        time.sleep(chance.uniform(0.0, 1.5))
        pair.server.kill()
        pair.taken_over()
        assert undisturbed == pair.server.digests(run)
        pair.standby.stand_by()
    for daemon in pair.daemons.values():
        acknowledged = [(line["run"], line["round"]) for line in daemon.events("submitted")]
        assert len(acknowledged) == len(set(acknowledged)), daemon.name


def test_a_worker_that_starts_while_nobody_leads_waits(pair: PairWithWorkers, undisturbed: list[str]) -> None:
    """Both coordinators and both workers are killed; they come back in another order."""
    _, slow = pair.half_delivered("nobody")
    for process in (*pair.workers, pair.standby, pair.server):
        process.kill()
    for worker in pair.workers:
        worker.start()
    slow.hold.unlink()
    pair.standby.start()
    eventually(pair.standby.leads, "the one that did not lead leads")
    pair.server = pair.standby
    assert undisturbed == pair.server.digests("nobody")
