"""How the ledger's database is opened, brought to the schema of this version, and what its errors mean.

All that is particular to SQLite stands in `sqlite_engine`, to PostgreSQL in `postgres`; the rest is the same for both.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from fl_server.store.base import StoreAway, StoreError, StoreFull
from fl_server.store.files import disk_errors, fsync_path
from fl_server.store.postgres import is_away, postgres_engine

_SQLITE_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN})
_SQLITE_FULL_EXTENDED = frozenset({sqlite3.SQLITE_IOERR_WRITE})
_SQLSTATE_FULL = frozenset({"53100", "25006", "42501"})
"""disk_full, read_only_sql_transaction, insufficient_privilege."""


def sqlite_engine(path: Path | str) -> Engine:
    """An engine on a SQLite file, or on ":memory:".

    WAL with synchronous=NORMAL writes each transaction into the log without an fsync: it survives SIGKILL of the
    process, and after a power cut the database is whole but may lack the last ones. A transaction with the execution
    option `fsynced` runs with synchronous=FULL: one fsync of the log, which carries all transactions before it,
    without the cost of a checkpoint. One with the option `reads` takes no right to write, which a read-only disk would
    not give. The pool holds one connection, so threads take turns and ":memory:" stays one database.
    """
    engine = create_engine(
        f"sqlite:///{path}", poolclass=QueuePool, pool_size=1, max_overflow=0, connect_args={"check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # else the driver begins transactions on its own, and too late for reads
        for pragma in ("busy_timeout=10000", "journal_mode=WAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        wanted = "FULL" if options.get("fsynced") else "NORMAL"
        if connection.info.get("synchronous") != wanted:
            connection.exec_driver_sql(f"PRAGMA synchronous={wanted}")
            connection.info["synchronous"] = wanted
        connection.exec_driver_sql("BEGIN" if options.get("reads") else "BEGIN IMMEDIATE")

    return engine


def engine_for(url_or_engine: str | Engine) -> Engine:
    """The engine for a URL of SQLite or PostgreSQL. Raises StoreError for one of another database."""
    if isinstance(url_or_engine, Engine):
        return url_or_engine
    if url_or_engine.startswith("sqlite:"):
        return sqlite_engine(make_url(url_or_engine).database or ":memory:")
    return postgres_engine(url_or_engine)


def prepare_file(path: Path) -> None:
    """Make the database file if it is missing, with its name on the disk. StoreFull where that is not allowed."""
    with disk_errors(f"open the ledger {path}"):
        if not path.exists():
            path.touch(mode=0o600)
            fsync_path(path.parent)


def migrate(connection: Connection) -> None:
    """Bring an empty or older database to this version's schema, inside the connection's transaction.

    Raises StoreError for a schema version this program does not know, and for a database that is not a ledger.
    """
    config = Config()
    config.set_main_option("script_location", "fl_server.store:migrations")
    config.attributes["connection"] = connection
    scripts = ScriptDirectory.from_config(config)
    known = {script.revision for script in scripts.walk_revisions()}
    found = MigrationContext.configure(connection).get_current_heads()
    database = connection.engine.url.database
    elsewhere = "state directory" if connection.dialect.name == "sqlite" else "database"
    if unknown := sorted(set(found) - known):
        raise StoreError(
            f"the ledger {database} has schema version {', '.join(unknown)}; this program knows versions up to "
            f"{scripts.get_current_head()}: start the newer program that wrote it, or name another {elsewhere}"
        )
    if not found and (tables := inspect(connection).get_table_names()):
        raise StoreError(
            f"the database {database} is not a ledger: it has tables ({', '.join(sorted(tables)[:5])}) but no schema "
            f"version: name another {elsewhere}"
        )
    if set(found) != set(scripts.get_heads()):
        command.upgrade(config, "head")


def _is_full(error: DBAPIError) -> bool:
    """Whether the database had no room or no right to write."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _SQLITE_FULL or code in _SQLITE_FULL_EXTENDED
    return getattr(error.orig, "sqlstate", None) in _SQLSTATE_FULL


def _said(error: DBAPIError) -> str:
    """The database's own words on one line; never the statement with its values."""
    return " ".join(str(error.orig).split())


@contextmanager
def database_errors(doing: str) -> Iterator[None]:
    """Turn the database library's errors into StoreFull, StoreAway or StoreError, keeping the cause.

    `doing` completes "could not ...".
    """
    try:
        yield
    except IntegrityError as error:
        raise StoreError(f"could not {doing}: it is there already, or its run is unknown ({_said(error)})") from error
    except DBAPIError as error:
        if _is_full(error):
            raise StoreFull(
                f"could not {doing}: {_said(error)}; make room or give the right to write, what was stored stays valid"
            ) from error
        if is_away(error):
            raise StoreAway(
                f"could not {doing}: {_said(error)}; see that PostgreSQL runs where `ledger` says and lets this user "
                "in, what was stored stays valid"
            ) from error
        raise StoreError(f"could not {doing}: {_said(error)}") from error
    except SQLAlchemyError as error:
        raise StoreError(f"could not {doing}: {error}") from error
