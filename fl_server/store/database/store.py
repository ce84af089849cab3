"""The ledger in a SQL database with SQLAlchemy Core, the same statements on every backend; how it is opened; its lease.

A leader and a standby use the lease of a ledger in PostgreSQL on a connection of their own, because it must be renewed
while the ledger's one carries out a long transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, create_engine, inspect, select

from fl_common.audit import Head
from fl_server.store.database import ownership, schema
from fl_server.store.database.ledger_audit import AuditLedger, newest_head
from fl_server.store.database.ledger_certificates import CertificateLedger
from fl_server.store.database.ledger_clients import ClientLedger
from fl_server.store.database.ledger_objects import ObjectLedger, StoredFile, objects
from fl_server.store.database.ledger_releases import ReleaseLedger
from fl_server.store.database.ledger_rounds import RoundLedger, StageLedger
from fl_server.store.database.ledger_runs import CommitLedger, Removal, RunLedger
from fl_server.store.database.ownership import ANYWHERE, Home, LeaseTerms
from fl_server.store.database.postgres import is_marked, mark_connections, postgres_engine
from fl_server.store.database.transactions import database_errors, prepare_file, server_engine
from fl_server.store.errors import StoreError, StoreTakenOver
from fl_server.store.files import Durability


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


LEDGER = "ledger.sqlite"
"""The ledger's file in a state directory."""


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
        return Store(server_engine(place, read_only=True), home=None)
    path = place / LEDGER
    if not path.is_file():
        raise StoreError(f"there is no ledger {path}: expected a coordinator's state directory, with {LEDGER} in it")
    return Store(create_engine(f"sqlite:///file:{quote(str(path))}?mode=ro&uri=true"), home=None)


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
    return Store(server_engine(url), durability, home, terms)


R = TypeVar("R")

GONE_S = 2.0
"""A leader without any connection for so long is gone. A lost connection is replaced within a second."""


@dataclass(frozen=True, slots=True)
class Leadership:
    """What the ledger says about leader and standbys."""

    leader: ownership.Leader | None
    standbys: Sequence[ownership.StandbyRow] = ()


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
            renewed = ownership.renew(db, self.epoch, self.seconds)
            leadership = Leadership(ownership.find(db), ownership.list_standbys(db))
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

    def _look(self, db: Connection) -> Leadership:
        if not inspect(db).has_table(ownership.leadership.name):
            return Leadership(None)
        leader = ownership.find(db)
        if leader is None or is_marked(db, leader.epoch):
            self._absence = _Absence()
        elif self._absence.epoch != leader.epoch:
            self._absence = _Absence(leader.epoch, self._clock())
        return Leadership(leader, ownership.list_standbys(db))

    def is_free(self, leadership: Leadership) -> bool:
        """Whether this standby may take the lease: it is over, or its leader is gone, or there was none."""
        leader = leadership.leader
        return leader is None or leader.left_s <= 0 or self.gone(leader) or leader.directory == self._directory

    def gone(self, leader: ownership.Leader) -> bool:
        """Whether a leader is gone."""
        absence = self._absence
        return absence.epoch == leader.epoch and self._clock() - absence.since >= GONE_S

    def note(self, behind_bytes: int) -> None:
        """Write that this standby waits."""
        self._run("note the standby", lambda db: ownership.note_standby(db, self._directory, behind_bytes))

    def forget(self) -> None:
        """Write that it waits no more."""
        self._run("forget the standby", lambda db: ownership.forget_standby(db, self._directory))

    def ledger_id(self) -> str:
        """The id of the ledger."""
        return self._run("read the ledger's id", lambda db: str(db.scalar(select(schema.identity.c.coordinator_id))))

    def audit_head(self) -> Head:
        """The newest row of the audit log."""
        return self._run("read the audit log", newest_head)

    def stored_files(self, folder: str) -> list[StoredFile]:
        """The files in the object store that count, in a folder and the folders in it."""
        query = select(objects).where(objects.c.name.startswith(f"{folder}/", autoescape=True))
        rows = self._run("read the files in the object store", lambda db: db.execute(query).mappings().all())
        return [StoredFile(**{**row, "parts": tuple(row["parts"])}) for row in rows]

    def open_runs(self) -> list[str]:
        """The ids of the runs that have not ended."""
        query = select(schema.runs.c.run_id).where(schema.runs.c.ended_at.is_(None))
        return self._run("read runs", lambda db: list(db.scalars(query)))

    def close(self) -> None:
        """Close the connection."""
        self._engine.dispose()

    def _run(self, doing: str, work: Callable[[Connection], R]) -> R:
        with database_errors(doing), self._engine.begin() as db:
            return work(db)
