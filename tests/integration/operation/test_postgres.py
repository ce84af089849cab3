"""A coordinator with its ledger in PostgreSQL: killed in mid-round, disconnected, replaced by a second one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from tests.postgres_server import PostgresServer
from tests.processes.federation import TASK, Coordinator, Fleet
from tests.processes.process import HERE, Workspace


@pytest.fixture(scope="module")
def url(postgres: PostgresServer) -> str:
    """URL of the ledger."""
    return postgres.new_ledger()


@pytest.fixture(scope="module")
def fleet_on_postgres(tmp_path_factory: pytest.TempPathFactory, url: str) -> Iterator[Fleet]:
    """A coordinator with that ledger, and three daemons."""
    with Workspace(tmp_path_factory.mktemp("postgres")) as workspace:
        yield Fleet(workspace, 3, ledger=url)


@pytest.fixture
def pg_fleet(fleet_on_postgres: Fleet) -> Iterator[Fleet]:
    """The fleet, idle and connected."""
    with fleet_on_postgres.lent() as fleet:
        yield fleet


def test_a_killed_coordinator_continues_in_the_same_round(pg_fleet: Fleet, undisturbed: list[str]) -> None:
    """After SIGKILL with one update admitted and one held, the first still counts. The models are those of SQLite."""
    assert undisturbed == pg_fleet.killed_in_mid_round("half-done")
    assert not (pg_fleet.server.folder / "server-state" / "ledger.sqlite").exists()


@pytest.mark.slow
def test_repeated_restarts_of_the_database_lose_nothing(
    pg_fleet: Fleet, undisturbed: list[str], postgres: PostgresServer
) -> None:
    """All connections are ended repeatedly, also during an upload. The run has the same models."""
    _, slow = pg_fleet.half_delivered("cut-off")
    postgres.cut_connections()
    slow.hold.unlink()
    for _ in range(20):
        postgres.cut_connections()
    assert undisturbed == pg_fleet.server.digests("cut-off")


@pytest.mark.slow
def test_a_coordinator_waits_for_an_unreachable_database(
    pg_fleet: Fleet, undisturbed: list[str], postgres: PostgresServer
) -> None:
    """A delivering client has to retry, and its update counts once it can be written."""
    server = pg_fleet.server
    _, slow = pg_fleet.half_delivered("away")
    before = len(server.events("rpc_refused", code="UNAVAILABLE"))
    with postgres.away():
        slow.hold.unlink()
        refused = server.logged("rpc_refused", before + 1, code="UNAVAILABLE")
    assert "check that PostgreSQL runs at the address in `ledger`" in refused["error"]
    assert undisturbed == server.digests("away")


@pytest.mark.slow
def test_a_second_coordinator_is_refused(pg_fleet: Fleet, url: str) -> None:
    """With another state directory but the same ledger it exits with 2 and names the owner."""
    second = Coordinator(pg_fleet.workspace, "second", {"ledger": url}).start()
    assert second.wait() == 2
    assert f"another coordinator has the ledger: impetus process {pg_fleet.server.pid} on host" in second.errors()


@pytest.mark.slow
def test_a_coordinator_that_was_replaced_ends(
    pg_fleet: Fleet, undisturbed: list[str], postgres: PostgresServer, url: str
) -> None:
    """Once another coordinator opens its ledger, it stops writing, logs the reason and exits. No work is lost."""
    server = pg_fleet.server
    quick, slow = pg_fleet.half_delivered("replaced")
    schema = url.rpartition("%3D")[2]
    postgres.execute(f"UPDATE {schema}.identity SET epoch = epoch + 1")  # noqa: S608 - a constant of the test
    slow.hold.unlink()
    assert server.wait() == 3
    assert "another coordinator has opened the ledger since this one did" in server.errors()
    server.serve()
    assert undisturbed == server.digests("replaced")
    assert [len(each.events("trained", run="replaced", round=0)) for each in (quick, slow)] == [1, 1]


@pytest.mark.slow
def test_a_run_is_replayed_from_postgresql(
    pg_fleet: Fleet, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`fl simulate --replay` reads the ledger of a running coordinator and computes the same models."""
    monkeypatch.syspath_prepend(HERE)  # the daemons' task
    pg_fleet.server.completed(pg_fleet.server.create("again", stop={"rounds": 2}))
    for daemon in pg_fleet.daemons.values():
        (tmp_path / daemon.config.name).write_text(daemon.config.read_text())
    config = tmp_path.with_suffix(".toml")
    config.write_text(f'[task]\nname = "{TASK}"\n')
    options = ["--replay", "again", "--ledger", url, "--client-configs", str(tmp_path)]
    result = CliRunner().invoke(app, ["simulate", str(config), *options])
    assert result.exit_code == 0, result.output
    assert "2 rounds replayed, every model equals the ledger's bit for bit" in result.output
