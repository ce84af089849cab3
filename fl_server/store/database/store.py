"""The ledger in a SQL database, the same statements on every backend: how it is opened, its lease, audit log and files.

A leader and a standby use the lease of a ledger in PostgreSQL on a connection of their own, because it must be renewed
while the ledger's one carries out a long transaction.

A file in the object store counts once its row is written, by a transaction that checks that this coordinator is still
the last that opened the ledger. A removal is written first and done later. So what a coordinator that was replaced puts
into the store, or has no time to remove, changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import sqlalchemy as sa

from fl_common.audit import START, AuditRow, Head
from fl_server.store.database import lease, schema
from fl_server.store.database.engines import database_errors, is_marked, mark_connections, postgres_engine, prepare_file
from fl_server.store.database.lease import LeaseTerms
from fl_server.store.database.ledger_certificates import CertificateLedger
from fl_server.store.database.ledger_clients import ClientLedger, ReleaseLedger
from fl_server.store.database.ledger_rounds import RoundLedger, StageLedger
from fl_server.store.database.ledger_runs import CommitLedger, Removal, RunLedger
from fl_server.store.database.schema import BigId, JsonText, columns_of, metadata
from fl_server.store.database.transactions import ANYWHERE, Home, Transactions
from fl_server.store.errors import Durability, StoreError, StoreTakenOver

R = TypeVar("R")
_TOGETHER = 500
"""Values of one statement: their number is limited."""
objects = sa.Table(
    "objects",
    metadata,
    sa.Column("name", sa.String(512), primary_key=True),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("digest", sa.LargeBinary, nullable=False),
    sa.Column("part_bytes", sa.BigInteger, nullable=False),
    sa.Column("parts", JsonText, nullable=False, comment="[end of a key, ...]"),
)
object_removals = sa.Table("object_removals", metadata, sa.Column("key", sa.String(1024), primary_key=True))
SCANNED = 5000
"""Rows that one call looks at: other calls of the ledger need their turn."""
_COLUMNS = tuple(field.name for field in fields(AuditRow))
audit = sa.Table("audit", metadata, *columns_of(AuditRow, ("number",), number=BigId, time_us=BigId))
"""Rows are only added. `hash` is SHA-256 over the previous row's hash and this row's other columns."""
LEDGER = "ledger.sqlite"
"""The ledger's file in a state directory."""
GONE_S = 2.0
"""A leader without any connection for so long is gone. A lost connection is replaced within a second."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in the object store, cut into parts, each of which is an object."""

    name: str
    """Its path in the state directory."""
    size_bytes: int
    digest: bytes
    """BLAKE3-256 of the whole file."""
    part_bytes: int
    """Bytes of each part but the last."""
    parts: tuple[str, ...]
    """The keys of its parts behind the name: number, epoch, count and BLAKE3-256, as NNNNN.EPOCH-COUNT.HEX."""

    @property
    def keys(self) -> list[str]:
        """The keys of its parts, below the ledger's folder."""
        return [f"{self.name}/{part}" for part in self.parts]


class ObjectLedger(Transactions):
    """The part of the `Store` for files in the object store."""

    def stored_files(self) -> list[StoredFile]:
        """All files that count, by name."""
        rows = self._read("the files in the object store", sa.select(objects).order_by(objects.c.name))
        return [StoredFile(**{**row, "parts": tuple(row["parts"])}) for row in rows]

    def add_stored_files(self, files: Sequence[StoredFile], *, fsynced: bool) -> None:
        """Let files count. The parts of files that they replace are to be removed, but for those that they have too."""
        with self._transaction("add files in the object store", fsynced=fsynced) as db:
            self._remove(db, [file.name for file in files], {key for file in files for key in file.keys})
            if files:
                db.execute(sa.insert(objects), [asdict(file) for file in files])

    def remove_stored_files(self, names: Sequence[str], others: Sequence[str] = ()) -> None:
        """Let files count no more; their parts, and other objects of which no file counts, are to be removed."""
        with self._transaction("remove files from the object store") as db:
            self._remove(db, names)
            self._to_remove(db, others)

    def object_removals(self, limit: int) -> list[str]:
        """Keys of objects to be removed."""
        query = sa.select(object_removals).order_by(object_removals.c.key).limit(limit)
        return [row["key"] for row in self._read("the objects to be removed", query)]

    def objects_removed(self, keys: Sequence[str]) -> None:
        """These objects are removed."""
        with self._transaction("note removed objects") as db:
            for some in _some(keys):
                db.execute(sa.delete(object_removals).where(object_removals.c.key.in_(some)))

    def _remove(self, db: sa.Connection, names: Sequence[str], kept: Collection[str] = ()) -> None:
        """kept: keys of parts that stay."""
        for some in _some(names):
            rows = db.execute(sa.select(objects.c.name, objects.c.parts).where(objects.c.name.in_(some))).all()
            keys = [f"{name}/{part}" for name, parts in rows for part in parts]
            self._to_remove(db, [key for key in keys if key not in kept])
            db.execute(sa.delete(objects).where(objects.c.name.in_(some)))

    @staticmethod
    def _to_remove(db: sa.Connection, keys: Sequence[str]) -> None:
        for some in _some(keys):
            known = set(db.scalars(sa.select(object_removals.c.key).where(object_removals.c.key.in_(some))))
            if fresh := [{"key": key} for key in dict.fromkeys(some) if key not in known]:
                db.execute(sa.insert(object_removals), fresh)


def _some(values: Sequence[str]) -> list[Sequence[str]]:
    return [values[first : first + _TOGETHER] for first in range(0, len(values), _TOGETHER)]


class AuditPage(NamedTuple):
    """Some rows, and where to continue."""

    rows: list[AuditRow]
    next: int
    """Number from which on rows were not looked at."""


class AuditLedger(Transactions):
    """The part of the `Store` for the audit log."""

    def add_audit_rows(self, rows: Sequence[AuditRow], after: Head, *, fsynced: bool) -> Head:
        """Add rows, which have numbers and hashes, if `after` is the newest row. Returns the newest row.

        Nothing is added if another row is the newest; the caller compares. The same rows again change nothing.
        """
        with self._transaction("write the audit log", fsynced=fsynced) as db:
            head = newest_head(db)
            if head != after or not rows:
                return head
            db.execute(sa.insert(audit), [{name: getattr(row, name) for name in _COLUMNS} for row in rows])
            return rows[-1].head

    def audit_rows(self, first: int, last: int, limit: int, matching: Mapping[str, str | int]) -> AuditPage:
        """At most `limit` rows with numbers from `first` to `last`, in order; at most SCANNED rows are looked at.

        matching: only rows with these values of actor, method, subject or result; "since_us": not before this time.
        """
        number, wanted = audit.c.number, dict(matching)
        since_us = wanted.pop("since_us", None)
        scanned = sa.select(audit).where(number.between(first, last)).order_by(number)
        beyond = scanned.with_only_columns(number).offset(SCANNED).limit(1)
        with self.snapshot() as db:
            end = db.execute(beyond).scalar()
            query = scanned.filter_by(**wanted).limit(limit)
            if end is not None:
                query = query.where(number < end)
            if since_us is not None:
                query = query.where(audit.c.time_us >= since_us)
            rows = [_row(row) for row in db.execute(query).mappings()]
        if len(rows) == limit:
            return AuditPage(rows, rows[-1].number + 1)
        return AuditPage(rows, last + 1 if end is None else end)

    def newest_audit_rows(self, count: int) -> list[AuditRow]:
        """The newest rows, in order of number."""
        query = sa.select(audit).order_by(audit.c.number.desc()).limit(count)
        return [_row(row) for row in reversed(self._read("the audit log", query))]


def newest_head(db: sa.Connection) -> Head:
    """The newest row."""
    newest = db.execute(sa.select(audit.c.number, audit.c.hash).order_by(audit.c.number.desc()).limit(1)).first()
    return START if newest is None else Head(newest.number, bytes(newest.hash))


def _row(row: sa.RowMapping) -> AuditRow:
    values: dict[str, Any] = {name: row[name] for name in _COLUMNS}
    return AuditRow(**{**values, "hash": bytes(values["hash"])})


class Store(
    RunLedger,
    RoundLedger,
    StageLedger,
    CommitLedger,
    ClientLedger,
    Removal,
    CertificateLedger,
    AuditLedger,
    ObjectLedger,
    ReleaseLedger,
):
    """The ledger: runs, attempts, admitted updates, accepted lists, commits, clients, certificates and history.

    Its methods are blocking and are called from one worker thread. Each write is one transaction, durable against
    SIGKILL when it returns, and most take the line of history that explains the change. Changes of a run by an
    operator, accepted lists and commits are fsynced; with durability "power" every write is. Tensors are stored
    elsewhere: updates in the spool, committed models in checkpoints.
    """


def open_sqlite(path: Path | str, durability: Durability = "process", home: Home = ANYWHERE) -> Store:
    """Open or make the ledger in a SQLite file; ":memory:" makes one that ends with the process.

    Raises StoreFull if the file cannot be written, and StoreError if it is not a ledger or has another schema.
    """
    if str(path) != ":memory:":
        prepare_file(Path(path))
    return Store(f"sqlite:///{path}", durability, home)


def open_read_only(place: Path | str) -> Store:
    """A ledger for reading while a coordinator may be writing it. A write through it is a StoreFull.

    place: a state directory, or the URL of a database in PostgreSQL. Raises StoreError if there is no ledger, or it has
    another schema.
    """
    if isinstance(place, str):
        return Store(postgres_engine(place, read_only=True), home=None)
    path = place / LEDGER
    if not path.is_file():
        raise StoreError(f"there is no ledger {path}: expected a coordinator's state directory, with {LEDGER} in it")
    return Store(sa.create_engine(f"sqlite:///file:{quote(str(path))}?mode=ro&uri=true"), home=None)


def open_ledger(
    url: str | None,
    state_dir: Path,
    durability: Durability = "process",
    home: Home = ANYWHERE,
    terms: LeaseTerms | None = None,
) -> Store:
    """The ledger at a PostgreSQL URL, or without one the SQLite file in the state directory.

    Raises LedgerHeld while another coordinator leads, StoreUnavailable while it cannot be reached, and StoreError when
    the directory (`home`) belongs to another ledger or the ledger to another directory: checkpoints belong to one
    ledger.
    """
    own = (state_dir / LEDGER).exists()
    if url is None and home.ledger and not own:
        raise StoreError(
            f"the ledger of {state_dir} is not there. If it was in PostgreSQL, `ledger` must name it; if its {LEDGER} "
            "was lost, restore the directory from a backup, or name a new one"
        )
    if url is None:
        return open_sqlite(state_dir / LEDGER, durability, home)
    if own:
        raise StoreError(
            f"{state_dir} has a ledger of its own, {LEDGER}, and `ledger` names another: the checkpoints belong to the "
            "first one, so remove the setting, or name a new state directory"
        )
    return Store(postgres_engine(url), durability, home, terms)


@dataclass(frozen=True, slots=True)
class Leadership:
    """What the ledger says about leader and standbys."""

    leader: lease.Leader | None
    standbys: Sequence[lease.StandbyRow] = ()


class LeaseKeeper:
    """Renews the lease of one leader. Blocking; used by one thread."""

    def __init__(self, url: str, epoch: int, seconds: float) -> None:
        self.epoch, self.seconds = epoch, seconds
        self._engine = postgres_engine(url)
        mark_connections(self._engine, None, epoch)
        self.renewed = time.monotonic()
        """When the last renewal began that succeeded. The lease lasts longer than this and its seconds."""

    def renew(self) -> Leadership:
        """Renew the lease. Raises StoreTakenOver, and StoreUnavailable while the ledger cannot be reached."""
        began = time.monotonic()
        with database_errors("renew the lease"), self._engine.begin() as db:
            renewed = lease.renew(db, self.epoch, self.seconds)
            leadership = Leadership(lease.find(db), lease.list_standbys(db))
        if not renewed:
            holder = leadership.leader.holder if leadership.leader else "another coordinator"
            raise StoreTakenOver(f"{holder} leads now; this one has changed nothing since")
        self.renewed = began
        return leadership

    def close(self) -> None:
        """Close the connection."""
        self._engine.dispose()


@dataclass(slots=True)
class _Absence:
    """Since when a leader has no connection."""

    epoch: int = 0
    since: float = field(default_factory=time.monotonic)


class LeaseWatch:
    """A standby's view of the ledger. Blocking; used by one thread. Raises StoreUnavailable."""

    def __init__(self, url: str, directory: str, clock: Callable[[], float] = time.monotonic) -> None:
        """directory: the id of the standby's state directory."""
        self._engine, self._directory, self._clock = postgres_engine(url), directory, clock
        self._absence = _Absence()

    def look(self) -> Leadership:
        """Leader and standbys now. There is no leader in a database without a ledger."""
        return self._run("read who leads", self._look)

    def _look(self, db: sa.Connection) -> Leadership:
        if not sa.inspect(db).has_table(lease.leadership.name):
            return Leadership(None)
        leader = lease.find(db)
        if leader is None or is_marked(db, leader.epoch):
            self._absence = _Absence()
        elif self._absence.epoch != leader.epoch:
            self._absence = _Absence(leader.epoch, self._clock())
        return Leadership(leader, lease.list_standbys(db))

    def is_free(self, leadership: Leadership) -> bool:
        """Whether this standby may take the lease: it is over, or its leader is gone, or there was none."""
        leader = leadership.leader
        return leader is None or leader.left_s <= 0 or self.gone(leader) or leader.directory == self._directory

    def gone(self, leader: lease.Leader) -> bool:
        """Whether a leader is gone."""
        absence = self._absence
        return absence.epoch == leader.epoch and self._clock() - absence.since >= GONE_S

    def note(self, behind_bytes: int) -> None:
        """Write that this standby waits."""
        self._run("note the standby", lambda db: lease.note_standby(db, self._directory, behind_bytes))

    def forget(self) -> None:
        """Write that it waits no more."""
        self._run("forget the standby", lambda db: lease.forget_standby(db, self._directory))

    def ledger_id(self) -> str:
        """The id of the ledger."""
        return self._run("read the ledger's id", lambda db: str(db.scalar(sa.select(schema.identity.c.coordinator_id))))

    def audit_head(self) -> Head:
        """The newest row of the audit log."""
        return self._run("read the audit log", newest_head)

    def stored_files(self, folder: str) -> list[StoredFile]:
        """The files in the object store that count, in a folder and the folders in it."""
        query = sa.select(objects).where(objects.c.name.startswith(f"{folder}/", autoescape=True))
        rows = self._run("read the files in the object store", lambda db: db.execute(query).mappings().all())
        return [StoredFile(**{**row, "parts": tuple(row["parts"])}) for row in rows]

    def open_runs(self) -> list[str]:
        """The ids of the runs that have not ended."""
        query = sa.select(schema.runs.c.run_id).where(schema.runs.c.ended_at.is_(None))
        return self._run("read runs", lambda db: list(db.scalars(query)))

    def close(self) -> None:
        """Close the connection."""
        self._engine.dispose()

    def _run(self, doing: str, work: Callable[[sa.Connection], R]) -> R:
        with database_errors(doing), self._engine.begin() as db:
            return work(db)
