"""The specifics of a ledger in PostgreSQL: its URL, its single connection, and its lock.

Every connection that can write takes an advisory lock of the database and schema before it is used, and there is one
connection at a time. So each writer holds the lock, also after a lost connection was replaced. The lock ends with the
connection: a pooler that shares connections among transactions cannot be used.
"""

from __future__ import annotations

import os
import socket
from typing import Any, Protocol

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import QueuePool

from fl_server.store.errors import StoreError, StoreUnavailable

DRIVER = "postgresql+psycopg"
LOCK_WAIT_S = 5.0
"""Wait of a connection for the lock: PostgreSQL needs a moment to notice that a killed coordinator is gone."""

_LOCK_SPACE = 0x1EDE  # the first half of the lock's key; the second is the schema's name
_LOCKED = "55P03"  # lock_not_available
_AWAY = frozenset({"57P01", "57P02", "57P03", "53300"})
"""admin_shutdown, crash_shutdown, cannot_connect_now, too_many_connections. Class 08 is all of connections."""
_CONNECT = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}
"""A silently lost peer is noticed within half a minute. Values in the URL take precedence."""
_LOCK = "SELECT pg_advisory_lock(%s, hashtext(coalesce(current_schema(), '')))"
_OURS = (
    # The same for the server: otherwise a machine that lost its power would keep the lock for hours.
    "SET tcp_keepalives_idle = 10",
    "SET tcp_keepalives_interval = 5",
    "SET tcp_keepalives_count = 3",
    # Durability must not depend on defaults of the database or the role.
    "SET synchronous_commit = off",
)
_HOLDER = """
SELECT application_name, backend_start::timestamptz(0)::text FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objid = (hashtext(coalesce(current_schema(), ''))::bigint & 4294967295)::oid
AND classid = %s::oid AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


class _Raw(Protocol):
    """The used part of the driver's connection. The driver may not be installed."""

    def execute(self, query: str, params: list[int] | None = None) -> Any: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


def postgres_engine(address: str, *, read_only: bool = False) -> Engine:
    """An engine on a PostgreSQL database, with one connection. It is tested before each use and replaced if lost.

    Transactions run with synchronous_commit off, those with the execution option `fsynced` with on: that one flush of
    the server's log carries all transactions before it. With `read_only` there is no lock, and every write is an error.
    Raises StoreError for another kind of URL, and when the driver is not installed. Connecting raises
    StoreUnavailable while
    another coordinator has the ledger.
    """
    url = _parse(address)
    about = {"application_name": f"impetus process {os.getpid()} on host {socket.gethostname()}", **_CONNECT}
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
    event.listen(engine, "connect", _configure_reader if read_only else _lock)
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


def _lock(connection: _Raw, _: Any) -> None:
    """Take the lock on a new connection that may write; the connection is closed if that fails."""
    try:
        for setting in _OURS:
            connection.execute(setting)
        connection.execute(f"SET LOCAL lock_timeout = {round(LOCK_WAIT_S * 1000)}")
        connection.execute(_LOCK, [_LOCK_SPACE])
        connection.commit()
    except Exception as error:  # the driver, and so its error class, may not be installed
        locked = getattr(error, "sqlstate", None) == _LOCKED
        holder = _holder(connection) if locked else ""
        connection.close()
        if locked:
            raise StoreUnavailable(
                f"another coordinator has the ledger: {holder}; stop it first, or give this one a database or schema "
                "of its own"
            ) from error
        raise


def _holder(connection: _Raw) -> str:
    """A description of the process that holds the lock."""
    connection.rollback()  # the transaction that waited for the lock has failed
    holder = connection.execute(_HOLDER, [_LOCK_SPACE]).fetchone()
    return f"{holder[0]}, connected since {holder[1]}" if holder else "it has just gone"
