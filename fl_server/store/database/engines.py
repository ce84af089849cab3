"""The databases of ledgers, SQLite and PostgreSQL: how each is opened, what its errors mean, and the mark of a leader.

The mark is a shared advisory lock of a PostgreSQL database and schema with the number of the leader's epoch. Nobody
waits for it: it tells a standby that the leader's process has a connection, and which one. It ends with the connection,
so a pooler that shares connections among transactions cannot be used.
"""

from __future__ import annotations

import os
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from fl_common.files import fsync_path
from fl_server.store.errors import StoreError, StoreFull, StoreUnavailable, disk_errors

DRIVER = "postgresql+psycopg"
IDLE_IN_TRANSACTION_S = 30
"""PostgreSQL ends a connection that hangs in a transaction for so long: its process was stopped, or is cut off."""
_LOCK_WAIT_S = 5
"""Longest wait for a lock of the database. Transactions take milliseconds."""
_AWAY = frozenset({"57P01", "57P02", "57P03", "53300", "55P03", "25P03"})
"""admin_shutdown, crash_shutdown, cannot_connect_now, too_many_connections, lock_not_available,
idle_in_transaction_session_timeout. Class 08 is all of connections."""
_CONNECT = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
"""A silently lost peer is noticed within half a minute. Values in the URL take precedence."""
_KEY = "hashtext('impetus ' || coalesce(current_schema(), ''))"
_MARK = f"SELECT pg_advisory_lock_shared({_KEY}, %s)"
_OPENING = f"SELECT pg_advisory_xact_lock({_KEY}, 0)"
_MARKED = f"""FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid()
AND classid = ({_KEY}::bigint & 4294967295)::oid AND objid = :epoch AND objsubid = 2
AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""  # noqa: S608 - constants
_OURS = (
    # The same for the server: otherwise a machine that lost its power would keep the lock for hours.
    "SET tcp_keepalives_idle = 10",
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 3",
    # Durability must not depend on defaults of the database or the role.
    "SET synchronous_commit = off",
    f"SET idle_in_transaction_session_timeout = '{IDLE_IN_TRANSACTION_S}s'",
    f"SET lock_timeout = '{_LOCK_WAIT_S}s'",
)


_SQLITE_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN})
_SQLITE_FULL_EXTENDED = frozenset({sqlite3.SQLITE_IOERR_WRITE})
_SQLSTATE_FULL = frozenset({"53100", "25006", "42501"})
"""disk_full, read_only_sql_transaction, insufficient_privilege."""


class _Raw(Protocol):
    """The used part of the driver's connection. The driver may not be installed."""

    def execute(self, query: str, params: list[int] | None = None) -> Any: ...
    def commit(self) -> None: ...


def postgres_engine(address: str, *, read_only: bool = False) -> sa.Engine:
    """An engine on a PostgreSQL database, with one connection. It is tested before each use and replaced if lost.

    Transactions run with synchronous_commit off, those with the execution option `fsynced` with on: that one flush of
    the server's log carries all transactions before it. With `read_only` every write is an error.
    Raises StoreError for another kind of URL, and when the driver is not installed.
    """
    url = _parse(address)
    about = {"application_name": process_name(), **_CONNECT}
    try:
        engine = sa.create_engine(
            url.set(drivername=DRIVER),
            poolclass=QueuePool,
            pool_size=1,
            max_overflow=0,
            pool_pre_ping=True,
            connect_args={key: value for key, value in about.items() if key not in url.query},
        )
    except ImportError as error:
        raise StoreError(
            f"a ledger in PostgreSQL needs the driver psycopg ({error}): install it with pip install '.[postgres]'"
        ) from error
    sa.event.listen(engine, "connect", _configure_reader if read_only else _configure_writer)
    sa.event.listen(engine, "begin", _begin)
    return engine


def _parse(address: str) -> sa.URL:
    """Raises StoreError without the parser's text, which may contain a part of the password."""
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):
        url = None
    if url is None or url.get_backend_name() != "postgresql":
        got = "something else" if url is None else f"{url.drivername}://..."
        raise StoreError(
            f"expected the URL of a ledger, such as postgresql://user@host:5432/database, got {got}; in a password "
            "an @ is written %40"
        )
    return url


def is_away(error: DBAPIError) -> bool:
    """Whether the server cannot be reached, or the connection to it was lost."""
    state = getattr(error.orig, "sqlstate", "")  # what is not PostgreSQL's has no such attribute
    if state is None:
        return error.connection_invalidated or isinstance(error, OperationalError)
    return state.startswith("08") or state in _AWAY


def _begin(connection: sa.Connection) -> None:
    if connection.get_execution_options().get("fsynced"):
        connection.exec_driver_sql("SET LOCAL synchronous_commit = on")


def _configure_reader(connection: _Raw, _: Any) -> None:
    """Prepare a new connection that only reads."""
    connection.execute("SET default_transaction_read_only = on")
    connection.commit()


def _configure_writer(connection: _Raw, _: Any) -> None:
    """Prepare a new connection that may write."""
    for setting in _OURS:
        connection.execute(setting)
    connection.commit()


def process_name() -> str:
    """This process, as operators see it."""
    return f"impetus process {os.getpid()} on host {socket.gethostname()}"


def lock_opening(db: sa.Connection) -> None:
    """Keep others from opening the ledger, or from making its tables, until the transaction ends."""
    db.exec_driver_sql(_OPENING)


def mark_connections(engine: sa.Engine, db: sa.Connection | None, epoch: int) -> None:
    """Mark a connection and all later ones of the engine as those of the leader with this epoch."""
    if db is not None:
        db.exec_driver_sql(_MARK, (epoch,))

    @sa.event.listens_for(engine, "connect")
    def mark(connection: _Raw, _: Any) -> None:
        connection.execute(_MARK, [epoch])
        connection.commit()


def is_marked(db: sa.Connection, epoch: int) -> bool:
    """Whether the leader with this epoch has a connection."""
    return bool(db.execute(sa.text(f"SELECT count(*) {_MARKED}"), {"epoch": epoch}).scalar())


def end_marked(db: sa.Connection, epoch: int) -> None:
    """End the connections of the leader with this epoch, which are of the same user."""
    db.execute(sa.text(f"SELECT pg_terminate_backend(pid) {_MARKED}"), {"epoch": epoch})


def count_on(db: sa.Connection, table: sa.Table) -> None:
    """Let PostgreSQL count numbers on behind the restored ones. Other databases do so anyway."""
    column = table.autoincrement_column
    if column is None or db.dialect.name != "postgresql":
        return
    sequence = db.execute(
        sa.text("SELECT pg_get_serial_sequence(:table, :name)"), {"table": table.name, "name": column.name}
    ).scalar()
    last = db.execute(sa.select(sa.func.max(column))).scalar()
    if sequence is not None and last is not None:
        db.execute(sa.text("SELECT setval(:sequence, :last)"), {"sequence": sequence, "last": last})


def sqlite_engine(path: Path | str) -> sa.Engine:
    """An engine on a SQLite file, or on ":memory:".

    WAL with synchronous=NORMAL writes each transaction into the log without an fsync: it survives SIGKILL of the
    process, and after a power cut the database is whole but may lack the last ones. A transaction with the execution
    option `fsynced` runs with synchronous=FULL: one fsync of the log, which covers all transactions before it, without
    the cost of a checkpoint. With the option `reads` there is no write lock, which a read-only disk would refuse: each
    statement is a transaction of its own, unless `snapshot` is given too. The pool holds one connection, so threads
    take turns and ":memory:" stays one database.
    """
    engine = sa.create_engine(
        f"sqlite:///{path}", poolclass=QueuePool, pool_size=1, max_overflow=0, connect_args={"check_same_thread": False}
    )

    @sa.event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # otherwise the driver begins transactions itself, too late for reads
        for pragma in ("busy_timeout=10000", "journal_mode=WAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        options = connection.get_execution_options()
        if options.get("reads"):
            if options.get("snapshot"):
                connection.exec_driver_sql("BEGIN")
            return
        wanted = "FULL" if options.get("fsynced") else "NORMAL"
        if connection.info.get("synchronous") != wanted:
            connection.exec_driver_sql(f"PRAGMA synchronous={wanted}")
            connection.info["synchronous"] = wanted
        try:  # a driver's own call is several times faster than SQLAlchemy's
            connection.connection.cursor().execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise DBAPIError.instance("BEGIN IMMEDIATE", None, error, sqlite3.Error) from error

    return engine


def engine_for(url_or_engine: str | sa.Engine) -> sa.Engine:
    """The engine for a URL of SQLite or of a database server. Raises StoreError for another kind."""
    if isinstance(url_or_engine, sa.Engine):
        return url_or_engine
    if url_or_engine.startswith("sqlite:"):
        return sqlite_engine(make_url(url_or_engine).database or ":memory:")
    return postgres_engine(url_or_engine)


def prepare_file(path: Path) -> None:
    """Make the database file if it is missing, with a durable name. Raises StoreFull if that is not permitted."""
    with disk_errors(f"open the ledger {path}"):
        if not path.exists():
            path.touch(mode=0o600)
            fsync_path(path.parent)


def _is_full(error: DBAPIError) -> bool:
    """Whether the disk is full or writing is not permitted."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _SQLITE_FULL or code in _SQLITE_FULL_EXTENDED
    return getattr(error.orig, "sqlstate", None) in _SQLSTATE_FULL


def _message(error: DBAPIError) -> str:
    """The database's message on one line, without the statement and its values."""
    return " ".join(str(error.orig).split())


@contextmanager
def database_errors(doing: str) -> Iterator[None]:
    """Turn the database library's errors into StoreFull, StoreUnavailable or StoreError, keeping the cause.

    `doing` completes "could not ...".
    """
    try:
        yield
    except IntegrityError as error:
        raise StoreError(f"could not {doing}: it exists already, or its run is unknown ({_message(error)})") from error
    except DBAPIError as error:
        if _is_full(error):
            raise StoreFull(
                f"could not {doing}: {_message(error)}; make room or give the right to write, what was stored stays "
                "valid"
            ) from error
        if is_away(error):
            raise StoreUnavailable(
                f"could not {doing}: {_message(error)}; check that PostgreSQL runs at the address in `ledger` and "
                "admits this user; everything stored stays valid"
            ) from error
        raise StoreError(f"could not {doing}: {_message(error)}") from error
    except SQLAlchemyError as error:
        raise StoreError(f"could not {doing}: {error}") from error
