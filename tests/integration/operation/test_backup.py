"""`fl-server backup` and `fl-server restore`: while a coordinator runs, into an empty ledger, and never uncharged."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fl_server.store.database.store import open_read_only
from tests.postgres_server import PostgresServer
from tests.processes.federation import Coordinator, Fleet
from tests.processes.process import ROOT, Workspace

pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")

PRIVATE: dict[str, Any] = {
    "privacy": {"unit": "client", "noise_multiplier": 0.5, "clip": 0.3, "delta": 0.01, "max_epsilon": 1000.0},
    "local": {"epochs": None, "steps": 4},
    "population": 3,
    "round": {"sampling": "bernoulli", "rate": 0.7},
}


def fl_server(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command of fl-server."""
    command = [sys.executable, "-m", "fl_server", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def charges(url: str) -> int:
    """Charges of the privacy account."""
    ledger = open_read_only(url)
    try:
        return sum(ledger.charged_accounts().values())
    finally:
        ledger.close()


def emptied(postgres: PostgresServer, url: str) -> None:
    """Remove all tables of a ledger."""
    schema = url.rpartition("%3D")[2]
    postgres.execute(f"DROP SCHEMA {schema} CASCADE")
    postgres.execute(f"CREATE SCHEMA {schema}")


@pytest.mark.slow
def test_a_backup_of_a_running_coordinator_is_restored(
    tmp_path: Path, postgres: PostgresServer, undisturbed: list[str]
) -> None:
    """In mid-round, with an admitted update. The run goes on from there, with the same bits."""
    url, store, backup = postgres.new_ledger(), tmp_path / "objects", tmp_path / "backup"
    store.mkdir()
    with Workspace(tmp_path) as workspace:
        fleet = Fleet(workspace, 3, ledger=url, storage=f"file://{store}")
        _, slow = fleet.half_delivered("kept")
        done = fl_server("backup", "--config", fleet.server.config, "--to", backup)
        assert (done.returncode, done.stderr) == (0, "")
        slow.hold.unlink()
        assert undisturbed == fleet.server.digests("kept")
        fleet.server.kill()
        emptied(postgres, url)
        shutil.rmtree(store)
        store.mkdir()
        shutil.rmtree(fleet.server.settings["state_dir"])
        restored = fl_server("restore", "--config", fleet.server.config, "--from", backup)
        assert (restored.returncode, restored.stderr) == (0, "")
        fleet.server.serve()
        assert fleet.server.run("kept").rounds_done == 0
        assert undisturbed == fleet.server.digests("kept")
        again = fl_server("restore", "--config", fleet.server.config, "--from", backup)
        assert again.returncode == 2


@pytest.mark.slow
def test_a_restored_account_is_charged_what_was_released_since(tmp_path: Path, postgres: PostgresServer) -> None:
    """The object store outlives the ledger. Without its counts the restore is refused, but by name."""
    url, store, backup = postgres.new_ledger(), tmp_path / "objects", tmp_path / "backup"
    store.mkdir()
    with Workspace(tmp_path) as workspace:
        fleet = Fleet(workspace, 3, ledger=url, storage=f"file://{store}")
        fleet.server.completed(fleet.server.create("first", **PRIVATE, stop={"rounds": 2}))
        assert fl_server("backup", "--config", fleet.server.config, "--to", backup).returncode == 0
        fleet.server.completed(fleet.server.create("second", **PRIVATE, stop={"rounds": 3}))
        fleet.server.kill()
        spent = charges(url)
        emptied(postgres, url)
        shutil.rmtree(fleet.server.settings["state_dir"])
        away = store.with_name("away")
        store.rename(away)
        store.mkdir()
        refused = fl_server("restore", "--config", fleet.server.config, "--from", backup)
        assert refused.returncode == 2
        assert "charges of the privacy accounts" in refused.stderr
        shutil.rmtree(store)
        away.rename(store)
        done = fl_server("restore", "--config", fleet.server.config, "--from", backup)
        assert (done.returncode, done.stderr) == (0, "")
        assert charges(url) < spent
        fleet.server.serve()
        assert charges(url) == spent


@pytest.mark.slow
def test_a_directory_is_backed_up_and_restored_elsewhere(tmp_path: Path, undisturbed: list[str]) -> None:
    """Not while its coordinator runs. A damaged backup is refused."""
    with Workspace(tmp_path) as workspace:
        fleet = Fleet(workspace, 3)
        _, slow = fleet.half_delivered("kept")
        backup = tmp_path / "backup"
        running = fl_server("backup", "--config", fleet.server.config, "--to", backup)
        assert running.returncode == 2
        assert "another coordinator runs on" in running.stderr
        fleet.server.kill()
        done = fl_server("backup", "--config", fleet.server.config, "--to", backup)
        assert (done.returncode, done.stderr) == (0, "")
        other = Coordinator(workspace, "other", {**fleet.server.settings, "state_dir": str(tmp_path / "elsewhere")})
        part = next((backup / "state" / "checkpoints").rglob("*.safetensors"))
        content = part.read_bytes()
        part.write_bytes(b"\0" + content[1:])
        damaged = fl_server("restore", "--config", other.config, "--from", backup)
        assert damaged.returncode == 2
        assert "the backup is damaged" in damaged.stderr
        part.write_bytes(content)
        restored = fl_server("restore", "--config", other.config, "--from", backup)
        assert (restored.returncode, restored.stderr) == (0, "")
        other.serve()
        slow.hold.unlink()
        assert undisturbed == other.digests("kept")
