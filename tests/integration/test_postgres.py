"""A coordinator whose ledger lies in PostgreSQL: killed in mid-round, cut off from it, asked for by a second one."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fl_ops.cli import app
from tests.integration.harness import TASK, Coordinator, Fleet
from tests.integration.processes import Place


@pytest.fixture(scope="module")
def url(postgres):
    """Where the ledger lies."""
    return postgres.new_ledger()


@pytest.fixture(scope="module")
def fleet_on_postgres(tmp_path_factory, url):
    """A coordinator with that ledger, and three daemons."""
    with Place(tmp_path_factory.mktemp("postgres")) as place:
        yield Fleet(place, 3, ledger=url)


@pytest.fixture
def pg_fleet(fleet_on_postgres):
    """All of it well and without work."""
    fleet_on_postgres.heal()
    yield fleet_on_postgres
    fleet_on_postgres.release()


def test_a_killed_coordinator_goes_on_in_the_same_round(pg_fleet, undisturbed):
    """One update admitted, the other held up, SIGKILL: the first still counts, and the models are SQLite's."""
    quick, slow = pg_fleet.half_delivered("half")
    server = pg_fleet.server
    server.kill()
    server.serve()
    status = server.run("half")
    assert (status.rounds_done, status.admitted) == (0, 1)
    slow.hold.unlink()
    assert undisturbed == server.digests("half")
    assert len(quick.events("trained", run="half", round=0)) == 1
    assert not (server.folder / "server-state" / "ledger.sqlite").exists()


def test_a_database_that_restarts_again_and_again_costs_nothing(pg_fleet, undisturbed, postgres):
    """All connections are ended while an update is on its way, and ever again: the run has the same models."""
    _, slow = pg_fleet.half_delivered("cut")
    postgres.cut_connections()
    slow.hold.unlink()
    for _ in range(20):
        postgres.cut_connections()
    assert undisturbed == pg_fleet.server.digests("cut")


def test_a_database_that_is_away_is_waited_for(pg_fleet, undisturbed, postgres):
    """Whoever would deliver an update is told to come again, and counts as ever once it can be written down."""
    server = pg_fleet.server
    _, slow = pg_fleet.half_delivered("away")
    before = len(server.events("rpc_refused", code="UNAVAILABLE"))
    with postgres.away():
        slow.hold.unlink()
        refused = server.logged("rpc_refused", before + 1, code="UNAVAILABLE")
    assert "see that PostgreSQL runs where `ledger` says" in refused["error"]
    assert undisturbed == server.digests("away")


def test_a_second_coordinator_is_refused(pg_fleet, url):
    """With a state directory of its own but the same ledger it says who has it, and exits with 2."""
    second = Coordinator(pg_fleet.place, "second", {"ledger": url}).start()
    assert second.wait() == 2
    assert f"another coordinator has the ledger: impetus process {pg_fleet.server.pid} on host" in second.errors()


def test_a_coordinator_that_was_replaced_ends(pg_fleet, undisturbed, postgres, url):
    """Its ledger was opened by another in mid-round: it writes nothing more, says why, and exits; no work is lost."""
    server = pg_fleet.server
    quick, slow = pg_fleet.half_delivered("replaced")
    schema = url.rpartition("%3D")[2]
    postgres.execute(f"UPDATE {schema}.identity SET openings = openings + 1")  # noqa: S608 - a name of the tests' own
    slow.hold.unlink()
    assert server.wait() == 2
    assert "another coordinator has opened the ledger since this one did" in server.errors()
    server.serve()
    assert undisturbed == server.digests("replaced")
    assert [len(each.events("trained", run="replaced", round=0)) for each in (quick, slow)] == [1, 1]


def test_a_run_is_replayed_from_there(pg_fleet, url, tmp_path, monkeypatch):
    """`fl simulate --replay` reads the ledger while the coordinator has it, and comes to the same models."""
    monkeypatch.syspath_prepend(Path(__file__).parent)  # the daemons' task
    pg_fleet.server.completed(pg_fleet.server.create("again", stop={"rounds": 2}))
    for daemon in pg_fleet.daemons.values():
        (tmp_path / daemon.config.name).write_text(daemon.config.read_text())
    config = tmp_path.with_suffix(".toml")
    config.write_text(f'[task]\nname = "{TASK}"\n')
    options = ["--replay", "again", "--ledger", url, "--client-configs", str(tmp_path)]
    result = CliRunner().invoke(app, ["simulate", str(config), *options])
    assert result.exit_code == 0, result.output
    assert "2 rounds done again, every model the ledger's bit for bit" in result.output
