"""Brings a database to the schema of this version: all tables of a new ledger, or alembic's migrations."""

from __future__ import annotations

from functools import cache

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine.mock import MockConnection

from fl_server.store.database.schema import metadata
from fl_server.store.errors import StoreError


def migrate(connection: sa.Connection) -> None:
    """Bring an empty or older database to this version's schema, inside the connection's transaction.

    Raises StoreError for a schema version this program does not know, and for a database that is not a ledger.
    """
    scripts = _scripts()
    known = [script.revision for script in scripts.walk_revisions()][::-1]
    context = MigrationContext.configure(connection)
    heads = context.get_current_heads()
    database = connection.engine.url.database
    elsewhere = "state directory" if connection.dialect.name == "sqlite" else "database"
    if unknown := sorted(set(heads) - set(known)):
        raise StoreError(
            f"the ledger {database} has schema version {', '.join(unknown)}, and this program reads "
            f"{', '.join(known)}: start the program that wrote it, or name another {elsewhere} to begin anew"
        )
    if not heads and (tables := sa.inspect(connection).get_table_names()):
        raise StoreError(
            f"the database {database} is not a ledger: it has tables ({', '.join(sorted(tables)[:5])}) but no schema "
            f"version: name another {elsewhere}"
        )
    if not heads:
        for statement in _new_tables(connection.dialect.name):
            connection.exec_driver_sql(statement)
        context.stamp(scripts, "head")
    elif set(heads) != set(scripts.get_heads()):
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "fl_server.store.database:migrations")
    return config


@cache
def _new_tables(database: str) -> tuple[str, ...]:
    """The statements that make all tables in a kind of database. Compiling them takes longer than executing them."""
    statements: list[str] = []
    engine: MockConnection = sa.create_mock_engine(
        f"{database}://", lambda made, *_args, **_kwargs: statements.append(str(made.compile(dialect=engine.dialect)))
    )
    metadata.create_all(engine, checkfirst=False)
    return tuple(statements)


@cache
def _scripts() -> ScriptDirectory:
    """The migrations of this version: files of the package, which a process reads once."""
    return ScriptDirectory.from_config(_config())
