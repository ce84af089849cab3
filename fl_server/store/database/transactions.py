"""Opens a ledger's database, takes the right to write it, and runs its transactions.

Checkpoints and ledger only make sense together, so the state directory and the ledger store each other's id. A lock
usually keeps a second coordinator out, but a lock can be lost: with the connection that holds it, behind a pooler, on a
network disk. Therefore the ledger counts its openings: the epoch. Each write checks that the epoch is still its own: a
coordinator that was replaced cannot change anything.

What all parts of the ledger share is here too: records to rows and back, and common statements. Column names are field
names; the few values that differ are here.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from fl_server.run_settings import privacy
from fl_server.store.client_work import ClientWork
from fl_server.store.database import lease, schema
from fl_server.store.database.engines import database_errors, engine_for, lock_opening, mark_connections
from fl_server.store.database.lease import LeaseTerms
from fl_server.store.database.migrations.schema_version import migrate
from fl_server.store.errors import Durability, StoreError, StoreTakenOver
from fl_server.store.records import (
    AttemptRecord,
    ClientRecord,
    HistoryRecord,
    QuarantineRecord,
    RunRecord,
    StageRecord,
    UpdateRecord,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_EPOCH = sa.select(schema.identity.c.epoch).with_for_update(read=True)
_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})
"""What `to_row` leaves as it is."""
Row = sa.RowMapping
LARGEST = 2**31 - 1
"""Largest number of a round or exchange in a ledger. Clients may send larger ones, which PostgreSQL cannot compare."""
HISTORY = "history"
"""The key in the `info` of a connection while its transaction has lines of history."""
Counted = Callable[[ClientWork], ClientWork]
"""The work of a client before and after an event."""
_WORK = sa.select(schema.clients.c.client_id, schema.clients.c.work).where(
    schema.clients.c.client_id.in_(sa.bindparam("ids", expanding=True))
)
_CHANGE_WORK = (
    sa.update(schema.clients).where(schema.clients.c.client_id == sa.bindparam("of")).values(work=sa.bindparam("new"))
)


def to_row(record: DataclassInstance) -> dict[str, Any]:
    """Field values by name, with mappings and tuples as the dicts and lists that JSON knows."""
    return {name: _plain(getattr(record, name)) for name in _names(type(record))}


@cache
def _names(kind: type[DataclassInstance]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _plain(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
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


def rows_where(table: sa.Table, **key: object) -> sa.Select[tuple[object, ...]]:
    """The rows of a table with these values."""
    return sa.select(table).filter_by(**key)


@cache
def rows_with(table: sa.Table, *columns: str) -> sa.Select[tuple[object, ...]]:
    """The rows of a table whose columns have the values that come with the execution; none is None.

    To make a statement costs more than to execute it, so the frequent ones are made once.
    """
    return sa.select(table).where(*(table.c[name] == sa.bindparam(name) for name in columns))


def find(db: sa.Connection, table: sa.Table, **key: object) -> Row | None:
    """A row with these values, none of which is None."""
    return db.execute(rows_with(table, *key), key).mappings().first()


@cache
def _replacing(table: sa.Table, key: tuple[str, ...], columns: tuple[str, ...]) -> sa.Update:
    return (
        sa.update(table)
        .where(*(table.c[name] == sa.bindparam(f"of_{name}") for name in key))
        .values({name: sa.bindparam(name) for name in columns})
    )


def replace(db: sa.Connection, table: sa.Table, key: Mapping[str, object], values: Mapping[str, object]) -> int:
    """Give the rows with this key, of which nothing is None, these values. Returns their number."""
    replacing = _replacing(table, tuple(key), tuple(values))
    return db.execute(replacing, {**{f"of_{name}": value for name, value in key.items()}, **values}).rowcount


@cache
def _removing(table: sa.Table, key: tuple[str, ...]) -> sa.Delete:
    return sa.delete(table).where(*(table.c[name] == sa.bindparam(name) for name in key))


def remove(db: sa.Connection, table: sa.Table, **key: object) -> int:
    """Remove the rows with these values, none of which is None. Returns their number."""
    return db.execute(_removing(table, tuple(key)), key).rowcount


def replace_run(db: sa.Connection, run: RunRecord) -> None:
    """Replace a run's record. Raises StoreError if there is none."""
    if not replace(db, schema.runs, {"run_id": run.run_id}, to_row(run)):
        raise StoreError(f"there is no run {run.run_id!r} to update; create it first")


def replace_quarantine_record(
    db: sa.Connection, quarantine: QuarantineRecord | None, why: HistoryRecord | None
) -> None:
    """Replace the quarantine record of a known client, with a line of history. An unknown client is ignored."""
    if quarantine is not None and find(db, schema.clients, client_id=quarantine.client_id):
        remove(db, schema.quarantines, client_id=quarantine.client_id)
        db.execute(sa.insert(schema.quarantines), to_row(quarantine))
        write_history(db, why)


def hides_cohorts(db: sa.Connection, run_id: str) -> bool:
    """Whether the run's cohorts are hidden, as `RunConfig.hides_cohorts`: its clients' work does not name it."""
    run = find(db, schema.runs, run_id=run_id)
    return run is not None and privacy.hides_cohorts(run["spec"])


def write_history(db: sa.Connection, *whys: HistoryRecord | None) -> None:
    """Write the lines of history that explain a change, if there are any."""
    if lines := [to_row(why) for why in whys if why is not None]:
        db.execute(sa.insert(schema.history), lines)
        db.info[HISTORY] = True


def count_work(db: sa.Connection, events: Mapping[str, Counted]) -> None:
    """Count what happened to the work of clients, by client. Forgotten clients are ignored."""
    if not events:
        return
    known = db.execute(_WORK, {"ids": list(events)}).all()
    changed = [{"of": client, "new": events[client](ClientWork.of(work)).to_values()} for client, work in known]
    if changed:
        db.execute(_CHANGE_WORK, changed)


def count_updates(db: sa.Connection, client_ids: Sequence[str]) -> None:
    """Count an update of a client for each time that it is named. Forgotten clients are ignored."""
    table, times = schema.clients, Counter(client_ids)
    for number in set(times.values()):
        clients = [client for client, count in times.items() if count == number]
        db.execute(
            sa.update(table)
            .where(table.c.client_id.in_(clients))
            .values(updates_counted=table.c.updates_counted + number)
        )


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


def identify(db: sa.Connection) -> str:
    """The ledger's own id."""
    return str(db.execute(sa.select(schema.identity.c.coordinator_id)).scalar())


def claim(db: sa.Connection, home: Home) -> Claim:
    """Take the right to write from earlier openings. Raises StoreError if the ledger belongs to another directory."""
    table = schema.identity
    identity = db.execute(sa.select(table)).first()
    if identity is None:
        new = {"coordinator_id": uuid.uuid4().hex, "directory": "", "epoch": 0, "storage": home.storage}
        db.execute(sa.insert(table).values(**new))
        identity = db.execute(sa.select(table)).one()
    if identity.storage and home.storage != identity.storage:
        raise StoreError(
            f"the files of the ledger are in {identity.storage}, and `storage` names {home.storage or 'none'}: set it "
            "to the first one, or begin with a new ledger and state directory"
        )
    # With an object store any directory will do: it has copies only.
    _require_together(home, identity.coordinator_id, "" if identity.storage else identity.directory)
    epoch = identity.epoch + 1
    db.execute(sa.update(table).values(epoch=epoch, directory=identity.directory or home.id))
    return Claim(identity.coordinator_id, epoch, moves=home.storage != identity.storage)


def require_claim(db: sa.Connection, mine: Claim) -> None:
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
        self,
        url_or_engine: str | sa.Engine,
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

    def _claimed(self, db: sa.Connection, home: Home, terms: LeaseTerms) -> Claim:
        """The right to write, with the lease in PostgreSQL. SQLite has the lock of its directory."""
        if not self._is_postgres:
            return claim(db, home)
        before = lease.require_free(db, home.id, terms)
        mine = claim(db, home)
        lease.take(db, home.id, mine.epoch, terms, before)
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
            db.execute(sa.update(schema.identity).values(storage=storage))

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
                lease.release(db, self._claim.epoch)
        self._engine.dispose()

    @contextmanager
    def _transaction(self, doing: str, *, fsynced: bool = False) -> Iterator[sa.Connection]:
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
    def snapshot(self) -> Iterator[sa.Connection]:
        """A transaction that reads the ledger as it is at its beginning."""
        level = {"isolation_level": "REPEATABLE READ"} if self._is_postgres else {}
        engine = self._reads.execution_options(snapshot=True, **level)
        with database_errors("read the ledger"), engine.begin() as db:
            yield db

    def _read(self, doing: str, query: sa.Select[tuple[object, ...]], **values: object) -> list[sa.RowMapping]:
        """The rows of a query. values: those of its parameters."""
        with database_errors(f"read {doing}"), self._reads.begin() as db:
            return list(db.execute(query, values).mappings())

    def _rows(self, doing: str, table: sa.Table, **key: object) -> list[sa.RowMapping]:
        """The rows of a table with these values, none of which is None."""
        return self._read(doing, rows_with(table, *key), **key)
