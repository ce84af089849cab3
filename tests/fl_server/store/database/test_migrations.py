"""The mechanism of migrations, with a made-up next version of the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.config import Config
from sqlalchemy import Engine, text

from fl_server.store.database.engines import engine_for
from fl_server.store.database.migrations import schema_version
from fl_server.store.database.store import Store
from fl_server.store.errors import StoreError
from tests.fl_server.store.records import a_client, a_run, events, why

NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "ledger_2"
down_revision = "ledger_1_staged"


def upgrade():
    op.add_column("history", sa.Column("weight", sa.Integer(), nullable=False, server_default="7"))
    with op.batch_alter_table("clients") as table:
        table.alter_column("note", new_column_name="remark")
"""


@pytest.fixture(params=["sqlite", "postgres"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    """A database of each kind with a ledger of this version: a run, a client and a line of history."""
    local = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    engine = engine_for(local if request.param == "sqlite" else request.getfixturevalue("postgres").new_ledger())
    store = Store(engine)
    store.create_run(a_run(), why("created"))
    store.put_clients([a_client(note="a note")])
    store.close()
    yield engine
    engine.dispose()


@pytest.fixture
def next_version(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the ledger was made, this program knows one version more, as the next one will."""
    (tmp_path / "ledger_2.py").write_text(NEXT)
    own = schema_version._config().get_main_option("script_location")

    def config() -> Config:
        found = Config()
        found.set_main_option("script_location", str(own))
        found.set_main_option("path_separator", "os")
        found.set_main_option("version_locations", f"{Path(schema_version.__file__).parent}/versions:{tmp_path}")
        return found

    monkeypatch.setattr(schema_version, "_config", config)
    monkeypatch.setattr(schema_version, "_scripts", schema_version._scripts.__wrapped__)


@pytest.mark.usefixtures("next_version")
def test_a_ledger_of_the_version_before_is_migrated(engine: Engine) -> None:
    """The next version's change is made at the start; all records stay, and the ledger can be written."""
    store = Store(engine)
    with store._reads.begin() as db:
        assert db.execute(text("SELECT version_num FROM alembic_version")).scalar() == "ledger_2"
        assert db.execute(text("SELECT event, weight FROM history")).all() == [("created", 7)]
        assert db.execute(text("SELECT client_id, remark FROM clients")).all() == [("a", "a note")]
    assert store.runs() == [a_run()]
    store.update_run(a_run(state="paused"), why("paused"))
    assert (store.runs(), events(store)) == ([a_run(state="paused")], ["created", "paused"])


@pytest.mark.parametrize("version", ["0014", "ledger_2"], ids=["from before", "newer"])
def test_a_ledger_of_an_unknown_version_is_refused(engine: Engine, version: str) -> None:
    """One sentence has the version that was found, the ones that are read, and what to do; nothing is changed."""
    with engine.begin() as db:
        db.execute(text("UPDATE alembic_version SET version_num = :it"), {"it": version})
    refusal = (
        rf"schema version {version}, and this program reads ledger_1_staged: start the program that wrote it, or name "
        r"another (state directory|database) to begin anew$"
    )
    with pytest.raises(StoreError, match=refusal):
        Store(engine)
    with engine.begin() as db:
        assert db.execute(text("SELECT version_num FROM alembic_version")).scalar() == version
        assert db.execute(text("SELECT note FROM clients")).scalar() == "a note"
