"""The specifics of a ledger in PostgreSQL: its URL, its single connection, and the mark of the leader's connections.

The mark is a shared advisory lock of database and schema with the number of the leader's epoch. Nobody waits for it: it
tells a standby that the leader's process has a connection, and which one. It ends with the connection, so a pooler that
shares connections among transactions cannot be used.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Protocol

from sqlalchemy import URL, Connection, Engine, Table, create_engine, event, func, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import QueuePool

from fl_server.store.errors import StoreError

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


class _Raw(Protocol):
    """The used part of the driver's connection. The driver may not be installed."""

    def execute(self, query: str, params: list[int] | None = None) -> Any: ...
    def commit(self) -> None: ...


def postgres_engine(address: str, *, read_only: bool = False) -> Engine:
    """An engine on a PostgreSQL database, with one connection. It is tested before each use and replaced if lost.

    Transactions run with synchronous_commit off, those with the execution option `fsynced` with on: that one flush of
    the server's log carries all transactions before it. With `read_only` every write is an error.
    Raises StoreError for another kind of URL, and when the driver is not installed.
    """
    url = _parse(address)
    about = {"application_name": process_name(), **_CONNECT}
    try:
        engine = create_engine(
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
    event.listen(engine, "connect", _configure_reader if read_only else _configure_writer)
    event.listen(engine, "begin", _begin)
    return engine


def _parse(address: str) -> URL:
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


def _begin(connection: Connection) -> None:
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


def lock_opening(db: Connection) -> None:
    """Keep others from opening the ledger, or from making its tables, until the transaction ends."""
    db.exec_driver_sql(_OPENING)


def mark_connections(engine: Engine, db: Connection | None, epoch: int) -> None:
    """Mark a connection and all later ones of the engine as those of the leader with this epoch."""
    if db is not None:
        db.exec_driver_sql(_MARK, (epoch,))

    @event.listens_for(engine, "connect")
    def mark(connection: _Raw, _: Any) -> None:
        connection.execute(_MARK, [epoch])
        connection.commit()


def is_marked(db: Connection, epoch: int) -> bool:
    """Whether the leader with this epoch has a connection."""
    return bool(db.execute(text(f"SELECT count(*) {_MARKED}"), {"epoch": epoch}).scalar())


def end_marked(db: Connection, epoch: int) -> None:
    """End the connections of the leader with this epoch, which are of the same user."""
    db.execute(text(f"SELECT pg_terminate_backend(pid) {_MARKED}"), {"epoch": epoch})


def count_on(db: Connection, table: Table) -> None:
    """Let PostgreSQL count numbers on behind the restored ones. Other databases do so anyway."""
    column = table.autoincrement_column
    if column is None or db.dialect.name != "postgresql":
        return
    sequence = db.execute(
        text("SELECT pg_get_serial_sequence(:table, :name)"), {"table": table.name, "name": column.name}
    ).scalar()
    last = db.execute(select(func.max(column))).scalar()
    if sequence is not None and last is not None:
        db.execute(text("SELECT setval(:sequence, :last)"), {"sequence": sequence, "last": last})
