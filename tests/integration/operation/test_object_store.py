"""A coordinator with its checkpoints and updates in an object store: killed, with a new disk, without its store."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulated_stores import StoreServer
from tests.postgres_server import PostgresServer
from tests.processes.federation import Coordinator, Fleet
from tests.processes.process import Workspace

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
@pytest.mark.parametrize("kind", ["s3", "az", "gs"])
def test_a_coordinator_continues_on_a_new_machine(
    request: pytest.FixtureRequest, kind: str, postgres: PostgresServer, undisturbed: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """After SIGKILL in mid-round, PostgreSQL and the store are all that is left. The models are those of a directory.

    The store of Google's kind checks no access.
    """
    server: StoreServer = request.getfixturevalue(kind)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    store = {"storage": f"{kind}://{server.new_bucket()}/impetus", "objects": {"endpoint": server.endpoint}}
    with Workspace(tmp_path) as workspace:
        fleet = Fleet(workspace, 3, ledger=postgres.new_ledger(), **store)
        assert undisturbed == fleet.killed_in_mid_round("moved", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bucket", "wrong", "said"),
    [
        ("s3", "", {"AWS_SECRET_ACCESS_KEY": "wrong"}, "refuses the credentials (SignatureDoesNotMatch)"),
        ("s3", "none", {}, "there is no bucket"),
        ("az", "", {"AZURE_STORAGE_ACCOUNT_KEY": "d3Jvbmc="}, "refuses the credentials (AuthorizationFailure)"),
        ("az", "none", {}, "there is no container"),
        ("gs", "", {"GOOGLE_SERVICE_ACCOUNT": "/away.json"}, "check GOOGLE_SERVICE_ACCOUNT"),
        ("gs", "none", {}, "there is no bucket"),
    ],
    ids=["s3-secret", "s3-bucket", "az-key", "az-container", "gs-file", "gs-bucket"],
)
def test_a_check_names_what_is_wrong(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, bucket: str,
    wrong: dict[str, str], said: str,
) -> None:  # fmt: skip
    """`fl-server check` exits with 2 and writes nothing, and a start does the same."""
    server: StoreServer = request.getfixturevalue(kind)
    for name, value in {**server.environment, **wrong}.items():
        monkeypatch.setenv(name, value)
    store = {"storage": f"{kind}://{bucket or server.new_bucket()}/a", "objects": {"endpoint": server.endpoint}}
    with Workspace(tmp_path) as workspace:
        coordinator = Coordinator(workspace, settings=store)
        arguments = [sys.executable, "-m", "fl_server", "check", "--config", str(coordinator.config)]
        checked = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert (checked.returncode, said in checked.stderr) == (2, True), checked.stderr
        assert not (coordinator.folder / "server-state").exists()
        assert coordinator.start().wait() == 2
        assert said in coordinator.errors()


def test_a_store_that_cannot_be_used_is_named_at_the_start(fleet: Fleet, tmp_path: Path) -> None:
    """The coordinator exits with 2, before anything is written."""
    second = Coordinator(fleet.workspace, "nowhere", {"storage": f"file://{tmp_path}/none"}).start()
    assert second.wait() == 2
    assert f"there is no folder {tmp_path}/none: mount or make it, or name another one" in second.errors()
