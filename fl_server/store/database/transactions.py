"""Opens a ledger's database, takes the right to write it, and runs its transactions; translates the database's errors.

`sqlite_engine` has the specifics of SQLite and `postgres` those of PostgreSQL; everything else is the same for both.

Each write checks that its own opening of the ledger is still the last (`ownership`): a coordinator that was replaced
cannot change anything.

What all parts of the ledger share is here too: records to rows and back, and common statements. Column names are field
names; the few values that differ are here.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    Connection,
    Engine,
    RowMapping,
    Select,
    Table,
    bindparam,
    create_engine,
    delete,
    event,
    insert,
    inspect,
    select,
)
from sqlalchemy import update as change
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from fl_common.files import fsync_path
from fl_server.run_settings import privacy
from fl_server.store.certificates import CertificateRecord, EnrollmentRecord, RevocationRecord
from fl_server.store.client_work import ClientWork
from fl_server.store.database import ownership, schema
from fl_server.store.database.ownership import ANYWHERE, Claim, Home, LeaseTerms, claim, identify, require_claim
from fl_server.store.database.postgres import is_away, lock_opening, mark_connections, postgres_engine
from fl_server.store.database.schema import metadata
from fl_server.store.errors import StoreError, StoreFull, StoreUnavailable
from fl_server.store.files import Durability, disk_errors
from fl_server.store.records import (
    AnswerRecord,
    AttemptRecord,
    ChargeRecord,
    ClientEvaluation,
    ClientRecord,
    ClientStateRecord,
    CommitRecord,
    FailureRecord,
    HistoryRecord,
    QuarantineRecord,
    RunRecord,
    StageRecord,
    TotalsRecord,
    UpdateRecord,
)

Record = (
    RunRecord | AttemptRecord | UpdateRecord | FailureRecord | CommitRecord | TotalsRecord | ClientEvaluation
    | ClientRecord | QuarantineRecord | ClientStateRecord | HistoryRecord | EnrollmentRecord | CertificateRecord
    | RevocationRecord | ChargeRecord | StageRecord | AnswerRecord
)  # fmt: skip
Row = RowMapping


def to_row(record: Record) -> dict[str, Any]:
    """Field values by name, with mappings and tuples as the dicts and lists that JSON knows."""
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    if isinstance(value, ClientWork):
        value = value.to_values()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    return value


def attempt_of(row: Row) -> AttemptRecord:
    """Row of `attempts` -> record."""
    return AttemptRecord(**{**row, "cohort": tuple(row["cohort"])})


def stage_of(row: Row) -> StageRecord:
    """Row of `secure_stages` -> record."""
    return StageRecord(**{**row, "members": tuple(row["members"]), "closed": tuple(row["closed"])})


def update_of(row: Row) -> UpdateRecord:
    """Row of `updates` -> record. A norm that was NaN is NULL in the table; so is a loss, which is then None."""
    norm = math.nan if row["norm"] is None else row["norm"]
    return UpdateRecord(**{**row, "norm": norm, "epochs": tuple(row["epochs"] or ())})


def client_of(row: Row) -> ClientRecord:
    """Row of `clients` -> record."""
    work = ClientWork.of(row["work"])
    lists = {name: tuple(row[name]) for name in ("tasks", "methods", "packages")}
    return ClientRecord(**{**row, **lists, "work": work})


def history_of(row: Row) -> HistoryRecord:
    """Row of `history` -> record."""
    return HistoryRecord(**{key: value for key, value in row.items() if key != "id"})


LARGEST = 2**31 - 1
"""Largest number of a round or exchange in a ledger. Clients may send larger ones, which PostgreSQL cannot compare."""


def rows_where(table: Table, **key: object) -> Select[tuple[object, ...]]:
    """The rows of a table with these values."""
    return select(table).filter_by(**key)


@cache
def rows_with(table: Table, *columns: str) -> Select[tuple[object, ...]]:
    """The rows of a table whose columns have the values that come with the execution; none is None.

    To make a statement costs more than to execute it, so the frequent ones are made once.
    """
    return select(table).where(*(table.c[name] == bindparam(name) for name in columns))


def find(db: Connection, table: Table, **key: object) -> Row | None:
    """A row with these values, none of which is None."""
    return db.execute(rows_with(table, *key), key).mappings().first()


def replace_run(db: Connection, run: RunRecord) -> None:
    """Replace a run's record. Raises StoreError if there is none."""
    table = schema.runs
    if not db.execute(change(table).where(table.c.run_id == run.run_id).values(to_row(run))).rowcount:
        raise StoreError(f"there is no run {run.run_id!r} to update; create it first")


def replace_quarantine_record(db: Connection, quarantine: QuarantineRecord | None, why: HistoryRecord | None) -> None:
    """Replace the quarantine record of a known client, with a line of history. An unknown client is ignored."""
    if quarantine is not None and find(db, schema.clients, client_id=quarantine.client_id):
        db.execute(delete(schema.quarantines).filter_by(client_id=quarantine.client_id))
        db.execute(insert(schema.quarantines), to_row(quarantine))
        write_history(db, why)


HISTORY = "history"
"""The key in the `info` of a connection while its transaction has lines of history."""


def hides_cohorts(db: Connection, run_id: str) -> bool:
    """Whether the run's cohorts are hidden, as `RunConfig.hides_cohorts`: its clients' work does not name it."""
    run = find(db, schema.runs, run_id=run_id)
    return run is not None and privacy.hides_cohorts(run["spec"])


def write_history(db: Connection, *whys: HistoryRecord | None) -> None:
    """Write the lines of history that explain a change, if there are any."""
    if lines := [to_row(why) for why in whys if why is not None]:
        db.execute(insert(schema.history), lines)
        db.info[HISTORY] = True


Counted = Callable[[ClientWork], ClientWork]
"""The work of a client before and after an event."""
_WORK = select(schema.clients.c.client_id, schema.clients.c.work).where(
    schema.clients.c.client_id.in_(bindparam("ids", expanding=True))
)
_CHANGE_WORK = change(schema.clients).where(schema.clients.c.client_id == bindparam("of")).values(work=bindparam("new"))


def count_work(db: Connection, events: Mapping[str, Counted]) -> None:
    """Count what happened to the work of clients, by client. Forgotten clients are ignored."""
    if not events:
        return
    known = db.execute(_WORK, {"ids": list(events)}).all()
    changed = [{"of": client, "new": events[client](ClientWork.of(work)).to_values()} for client, work in known]
    if changed:
        db.execute(_CHANGE_WORK, changed)


def increment(db: Connection, client_ids: Sequence[str], counter: str) -> None:
    """Add 1 to a counter of clients for each time that they are named. Forgotten clients are ignored."""
    table, times = schema.clients, Counter(client_ids)
    for number in set(times.values()):
        clients = [client for client, count in times.items() if count == number]
        db.execute(change(table).where(table.c.client_id.in_(clients)).values({counter: table.c[counter] + number}))


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


def server_engine(url: str, *, read_only: bool = False) -> Engine:
    """The engine for a URL of a database server. Raises StoreError for another kind. read_only: no write succeeds."""
    return postgres_engine(url, read_only=read_only)


def engine_for(url_or_engine: str | Engine) -> Engine:
    """The engine for a URL of SQLite or of a database server. Raises StoreError for another kind."""
    if isinstance(url_or_engine, Engine):
        return url_or_engine
    if url_or_engine.startswith("sqlite:"):
        return sqlite_engine(make_url(url_or_engine).database or ":memory:")
    return server_engine(url_or_engine)


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


class Transactions:
    """A SQLAlchemy engine or database URL, opened as a ledger and brought to the schema of this version.

    With durability "power" every write is fsynced. A write raises StoreTakenOver once another coordinator has opened
    the ledger.
    """

    def __init__(
        self,
        url_or_engine: str | Engine,
        durability: Durability = "process",
        home: Home | None = ANYWHERE,
        terms: LeaseTerms | None = None,
    ) -> None:
        """home: the state directory that the ledger must belong to; None for a reader. terms: of a lease.

        Raises LedgerHeld if another coordinator has the lease.
        """
        self._after_history: Callable[[], object] | None = None
        self._claim: Claim | None = None
        with database_errors("open the ledger"):
            self._engine = engine_for(url_or_engine)
        self._reads = self._engine.execution_options(reads=True)
        self._fsynced = self._engine.execution_options(fsynced=True)
        self._writes = self._fsynced if durability == "power" else self._engine
        try:
            with database_errors("open the ledger"), self._fsynced.begin() as db:
                if home is not None and self._is_postgres:
                    lock_opening(db)
                migrate(db)
                self._claim = None if home is None else self._claimed(db, home, terms or LeaseTerms())
                self.coordinator_id = identify(db)
                """Random id of this ledger, made once with it."""
        except StoreError:
            self.close()
            raise

    def _claimed(self, db: Connection, home: Home, terms: LeaseTerms) -> Claim:
        """The right to write, with the lease in PostgreSQL. SQLite has the lock of its directory."""
        if not self._is_postgres:
            return claim(db, home)
        before = ownership.require_free(db, home, terms)
        mine = claim(db, home)
        ownership.take(db, home, mine.epoch, terms, before)
        mark_connections(self._engine, db, mine.epoch)
        return mine

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
        return "C" if self._is_postgres else "BINARY"

    @property
    def _is_postgres(self) -> bool:
        return self._engine.dialect.name == "postgresql"

    def close(self) -> None:
        """Give the lease back, and release files and connections."""
        if self._claim is not None and self._is_postgres:
            # A ledger that cannot be reached now gives its lease back by time.
            with suppress(StoreError), self._transaction("give the lease back") as db:
                ownership.release(db, self._claim.epoch)
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

    @contextmanager
    def snapshot(self) -> Iterator[Connection]:
        """A transaction that reads the ledger as it is at its beginning."""
        level = {"isolation_level": "REPEATABLE READ"} if self._is_postgres else {}
        engine = self._reads.execution_options(**level)
        with database_errors("read the ledger"), engine.begin() as db:
            yield db

    def _read(self, doing: str, query: Select[tuple[object, ...]], **values: object) -> list[RowMapping]:
        """The rows of a query. values: those of its parameters."""
        with database_errors(f"read {doing}"), self._reads.begin() as db:
            return list(db.execute(query, values).mappings())

    def _rows(self, doing: str, table: Table, **key: object) -> list[RowMapping]:
        """The rows of a table with these values, none of which is None."""
        return self._read(doing, rows_with(table, *key), **key)
