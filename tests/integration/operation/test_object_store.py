"""A coordinator with its checkpoints and updates in an object store: killed, with a new disk, without its store."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.postgres_server import PostgresServer
from tests.processes.federation import Coordinator, Fleet
from tests.processes.process import Workspace
from tests.s3_server import S3Server

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is the object store."""
    return tmp_path_factory.mktemp("objects")


@pytest.fixture(scope="module")
def fleet_on_objects(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Iterator[Fleet]:
    """A coordinator with that store, and three daemons."""
    with Workspace(tmp_path_factory.mktemp("fleet")) as workspace:
        yield Fleet(workspace, 3, storage=f"file://{store}", objects={"retry_s": 0.5})


@pytest.fixture
def fleet(fleet_on_objects: Fleet) -> Iterator[Fleet]:
    """The fleet, idle and connected."""
    with fleet_on_objects.lent() as lent:
        yield lent


def test_a_killed_coordinator_continues_with_a_new_disk(fleet: Fleet, undisturbed: list[str], store: Path) -> None:
    """Its checkpoints and the admitted update come from the store. The models are those of a directory."""
    assert undisturbed == fleet.killed_in_mid_round("half-done", "spool", "checkpoints")
    assert [path for path in store.rglob("*.safetensors/*") if path.is_file()]


def test_a_run_waits_for_an_unreachable_store(fleet: Fleet, undisturbed: list[str], store: Path) -> None:
    """The run says why it waits, a delivering client has to retry, and its update counts once it can be written."""
    server = fleet.server
    _, slow = fleet.half_delivered("away")
    away = store.with_name("away")
    store.rename(away)
    slow.hold.unlink()
    refused = server.logged("rpc_refused", code="UNAVAILABLE")
    assert f"there is no folder {store}: make it, or correct `storage`" in refused["error"]
    server.until("away", lambda run: "there is no folder" in run.reason, "the run says why it waits")
    away.rename(store)
    assert undisturbed == server.digests("away")


@pytest.mark.slow
def test_a_coordinator_continues_on_a_new_machine(
    s3: S3Server, postgres: PostgresServer, undisturbed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL in mid-round, PostgreSQL and S3 are all that is left. The models are those of a directory."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    store = {"storage": f"s3://{s3.new_bucket()}/impetus", "objects": {"endpoint": s3.endpoint}}
    with Workspace(tmp_path) as workspace:
        fleet = Fleet(workspace, 3, ledger=postgres.new_ledger(), **store)
        assert undisturbed == fleet.killed_in_mid_round("moved", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bucket", "secret", "said"),
    [("", "wrong", "the store refuses the credentials (SignatureDoesNotMatch)"), ("none", "", "there is no bucket")],
    ids=["secret", "bucket"],
)
def test_a_check_names_what_is_wrong(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: str, secret: str, said: str
) -> None:
    """`fl-server check` exits with 2 and writes nothing, and a start does the same."""
    for name, value in {**s3.environment, **({"AWS_SECRET_ACCESS_KEY": secret} if secret else {})}.items():
        monkeypatch.setenv(name, value)
    store = {"storage": f"s3://{bucket or s3.new_bucket()}/a", "objects": {"endpoint": s3.endpoint}}
    with Workspace(tmp_path) as workspace:
        server = Coordinator(workspace, settings=store)
        arguments = [sys.executable, "-m", "fl_server", "check", "--config", str(server.config)]
        checked = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert (checked.returncode, said in checked.stderr) == (2, True), checked.stderr
        assert not (server.folder / "server-state").exists()
        assert server.start().wait() == 2
        assert said in server.errors()


def test_a_store_that_cannot_be_used_is_named_at_the_start(fleet: Fleet, tmp_path: Path) -> None:
    """The coordinator exits with 2, before anything is written."""
    second = Coordinator(fleet.workspace, "nowhere", {"storage": f"file://{tmp_path}/none"}).start()
    assert second.wait() == 2
    assert f"there is no folder {tmp_path}/none: mount or make it, or name another one" in second.errors()
