"""Opens a ledger's database, takes the right to write it, and runs its transactions; translates the database's errors.

`sqlite_engine` has the specifics of SQLite and `postgres` those of PostgreSQL; everything else is the same for both.

Checkpoints and ledger only make sense together, so the state directory and the ledger store each other's id. A lock
usually keeps a second coordinator out, but a lock can be lost: with the connection that holds it, behind a pooler, on a
network disk. Therefore the ledger counts its openings, and each write checks that its own opening is still the last: a
coordinator that was replaced cannot change anything.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, RowMapping, Select, Table, create_engine, event, insert, inspect, select
from sqlalchemy import update as change
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from fl_common.files import fsync_path
from fl_server.store.database import schema
from fl_server.store.database.postgres import is_away, postgres_engine
from fl_server.store.database.rows import HISTORY, rows_with
from fl_server.store.database.schema import metadata
from fl_server.store.errors import StoreError, StoreFull, StoreTakenOver, StoreUnavailable
from fl_server.store.files import Durability, disk_errors

_SQLITE_FULL = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_CANTOPEN})
_SQLITE_FULL_EXTENDED = frozenset({sqlite3.SQLITE_IOERR_WRITE})
_SQLSTATE_FULL = frozenset({"53100", "25006", "42501"})
"""disk_full, read_only_sql_transaction, insufficient_privilege."""


def sqlite_engine(path: Path | str) -> Engine:
    """An engine on a SQLite file, or on ":memory:".

    WAL with synchronous=NORMAL writes each transaction into the log without an fsync: it survives SIGKILL of the
    process, and after a power cut the database is whole but may lack the last ones. A transaction with the execution
    option `fsynced` runs with synchronous=FULL: one fsync of the log, which covers all transactions before it, without
    the cost of a checkpoint. A transaction with the option `reads` takes no write lock, which a read-only disk would
    refuse. The pool holds one connection, so threads take turns and ":memory:" stays one database.
    """
    engine = create_engine(
        f"sqlite:///{path}", poolclass=QueuePool, pool_size=1, max_overflow=0, connect_args={"check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # otherwise the driver begins transactions itself, too late for reads
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
    """Make the database file if it is missing, with a durable name. Raises StoreFull if that is not permitted."""
    with disk_errors(f"open the ledger {path}"):
        if not path.exists():
            path.touch(mode=0o600)
            fsync_path(path.parent)


def migrate(connection: Connection) -> None:
    """Bring an empty or older database to this version's schema, inside the connection's transaction.

    Raises StoreError for a schema version this program does not know, and for a database that is not a ledger.
    """
    scripts = _scripts()
    known = [script.revision for script in scripts.walk_revisions()][::-1]
    heads = MigrationContext.configure(connection).get_current_heads()
    database = connection.engine.url.database
    elsewhere = "state directory" if connection.dialect.name == "sqlite" else "database"
    if unknown := sorted(set(heads) - set(known)):
        raise StoreError(
            f"the ledger {database} has schema version {', '.join(unknown)}, and this program reads "
            f"{', '.join(known)}: start the program that wrote it, or name another {elsewhere} to begin anew"
        )
    if not heads and (tables := inspect(connection).get_table_names()):
        raise StoreError(
            f"the database {database} is not a ledger: it has tables ({', '.join(sorted(tables)[:5])}) but no schema "
            f"version: name another {elsewhere}"
        )
    if set(heads) != set(scripts.get_heads()):
        config = _config()
        config.attributes["connection"] = connection
        if not heads:
            metadata.create_all(connection)
        (command.upgrade if heads else command.stamp)(config, "head")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", "fl_server.store.database:migrations")
    return config


@cache
def _scripts() -> ScriptDirectory:
    """The migrations of this version: files of the package, which a process reads once."""
    return ScriptDirectory.from_config(_config())


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


@dataclass(frozen=True, slots=True)
class Home:
    """The state directory of a ledger."""

    id: str
    """Id of the directory; "" without a directory, and then any ledger fits."""
    ledger: str = ""
    """Id of its ledger; "" before the first ledger."""
    storage: str = ""
    """URL of the object store that has the files of the ledger; "": the directory has them."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write, until another coordinator opens the ledger."""

    coordinator_id: str
    epoch: int
    """How often the ledger was opened until then."""
    moves: bool = False
    """Whether the files of the ledger are still in the directory, and go into the object store now."""


def identify(db: Connection) -> str:
    """The ledger's own id."""
    return str(db.execute(select(schema.identity.c.coordinator_id)).scalar())


def claim(db: Connection, home: Home) -> Claim:
    """Take the right to write from earlier openings. Raises StoreError if the ledger belongs to another directory."""
    table = schema.identity
    identity = db.execute(select(table)).first()
    if identity is None:
        new = {"coordinator_id": uuid.uuid4().hex, "directory": "", "epoch": 0, "storage": home.storage}
        db.execute(insert(table).values(**new))
        identity = db.execute(select(table)).one()
    if identity.storage and home.storage != identity.storage:
        raise StoreError(
            f"the files of the ledger are in {identity.storage}, and `storage` names {home.storage or 'none'}: set it "
            "to the first one, or begin with a new ledger and state directory"
        )
    # With an object store any directory will do: it has copies only.
    _require_together(home, identity.coordinator_id, "" if identity.storage else identity.directory)
    epoch = identity.epoch + 1
    db.execute(change(table).values(epoch=epoch, directory=identity.directory or home.id))
    return Claim(identity.coordinator_id, epoch, moves=home.storage != identity.storage)


_EPOCH = select(schema.identity.c.epoch).with_for_update(read=True)


def require_claim(db: Connection, mine: Claim) -> None:
    """Raises StoreTakenOver if the ledger was opened since. Until the transaction ends, it cannot be opened."""
    if db.execute(_EPOCH).scalar() != mine.epoch:
        raise StoreTakenOver(
            "another coordinator has opened the ledger since this one did, and continues its runs: make sure that only "
            "one coordinator is started on a ledger; this one has changed nothing since"
        )


def _require_together(home: Home, ledger: str, directory: str) -> None:
    if home.ledger and home.ledger != ledger:
        raise StoreError(
            f"the state directory belongs to the ledger {home.ledger}, and this one is {ledger}: its checkpoints "
            "belong to the first one, so let `ledger` name that one again, or name a new state directory"
        )
    if home.id and directory and home.id != directory:
        raise StoreError(
            f"the ledger belongs to the state directory with the id {directory}, and this one has {home.id}: its "
            "checkpoints are there, so name that directory, or an empty database or schema for this one"
        )


ANYWHERE = Home("")
"""The home of a ledger that belongs to no state directory."""


class Transactions:
    """A SQLAlchemy engine or database URL, opened as a ledger and brought to the schema of this version.

    With durability "power" every write is fsynced. A write raises StoreTakenOver once another coordinator has opened
    the ledger.
    """

    def __init__(
        self, url_or_engine: str | Engine, durability: Durability = "process", home: Home | None = ANYWHERE
    ) -> None:
        """home: the state directory that the ledger must belong to; None for a reader."""
        self._after_history: Callable[[], object] | None = None
        with database_errors("open the ledger"):
            self._engine = engine_for(url_or_engine)
        self._reads = self._engine.execution_options(reads=True)
        self._fsynced = self._engine.execution_options(fsynced=True)
        self._writes = self._fsynced if durability == "power" else self._engine
        try:
            with database_errors("open the ledger"), self._fsynced.begin() as db:
                migrate(db)
                self._claim = None if home is None else claim(db, home)
                self.coordinator_id = identify(db)
                """Random id of this ledger, made once with it."""
        except StoreError:
            self.close()
            raise

    @property
    def claim(self) -> Claim:
        """The right to write. Its epoch is in the names of objects."""
        if self._claim is None:
            raise RuntimeError("expected a ledger that is open for writing")
        return self._claim

    def moved_to(self, storage: str) -> None:
        """The files of the ledger are in this object store from now on."""
        with self._transaction("note where the files are", fsynced=True) as db:
            db.execute(change(schema.identity).values(storage=storage))

    @property
    def _byte_order(self) -> str:
        """The collation that orders text by its bytes."""
        return "BINARY" if self._engine.dialect.name == "sqlite" else "C"

    def close(self) -> None:
        """Release files and connections."""
        self._engine.dispose()

    @contextmanager
    def _transaction(self, doing: str, *, fsynced: bool = False) -> Iterator[Connection]:
        """A transaction. `doing` completes "could not ..." in errors."""
        with database_errors(doing), (self._fsynced if fsynced else self._writes).begin() as db:
            if self._claim is not None:
                require_claim(db, self._claim)
            db.info.pop(HISTORY, None)  # of a transaction that was rolled back
            yield db
            has_history = db.info.pop(HISTORY, False)
        if has_history and self._after_history is not None:
            self._after_history()

    def after_history(self, call: Callable[[], object] | None) -> None:
        """Call this after each transaction with lines of history, in the transaction's thread; None: nothing."""
        self._after_history = call

    def _read(self, doing: str, query: Select[tuple[object, ...]], **values: object) -> list[RowMapping]:
        """The rows of a query. values: those of its parameters."""
        with database_errors(f"read {doing}"), self._reads.begin() as db:
            return list(db.execute(query, values).mappings())

    def _rows(self, doing: str, table: Table, **key: object) -> list[RowMapping]:
        """The rows of a table with these values, none of which is None."""
        return self._read(doing, rows_with(table, *key), **key)
