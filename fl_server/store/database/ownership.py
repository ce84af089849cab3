"""Which state directory a ledger belongs to, which coordinator may write it, and the lease in PostgreSQL.

Checkpoints and ledger only make sense together, so the state directory and the ledger store each other's id. A lock
usually keeps a second coordinator out, but a lock can be lost: with the connection that holds it, behind a pooler, on a
network disk. Therefore the ledger counts its openings: the epoch. Each write checks that the epoch is still its own.

The lease has who leads, until when by the database's clock, and which standbys wait.
The lease decides when a standby may take over. It is no protection: that is the epoch, which every transaction checks.
Each taking of the lease is a new opening of the ledger and so a new epoch. The leader's connections carry a mark, an
advisory lock with the number of its epoch that nobody waits for. When all marks of an epoch are gone, its leader has
probably been killed, and the lease need not be waited for.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import Column, Connection, Double, Integer, String, Table, delete, func, insert, select
from sqlalchemy import update as change

from fl_server.store.database import schema
from fl_server.store.database.postgres import end_marked, process_name
from fl_server.store.errors import LedgerHeld, StoreError, StoreTakenOver

_EPOCH = select(schema.identity.c.epoch).with_for_update(read=True)
leadership = Table(
    "leadership",
    schema.metadata,
    Column("epoch", Integer, primary_key=True, autoincrement=False),
    Column("holder", schema.Words, nullable=False),
    Column("directory", String(64), nullable=False),
    Column("since", Double, nullable=False),
    Column("until", Double, nullable=False),
)
"""One row: the newest leader. Times are the database's, as Unix seconds."""
standbys = Table(
    "standbys",
    schema.metadata,
    Column("directory", String(64), primary_key=True),
    Column("holder", schema.Words, nullable=False),
    Column("since", Double, nullable=False),
    Column("seen", Double, nullable=False),
    Column("behind_bytes", schema.BigId, nullable=False),
)
NOW = func.extract("epoch", func.clock_timestamp())
STANDBY_SEEN_S = 5.0
"""A standby that has not reported for so long is not counted on."""


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


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How a ledger's lease is taken."""

    seconds: float = 10.0
    """How long it lasts without a renewal."""
    gone: int = 0
    """The epoch whose leader is known to have no connection left: its lease is not waited for. 0: none."""


@dataclass(frozen=True, slots=True)
class Leader:
    """The newest leader."""

    epoch: int
    holder: str
    directory: str
    since: float
    """Unix seconds by the database's clock."""
    left_s: float
    """Seconds until its lease ends; 0 or less: it has ended, or was given back."""


@dataclass(frozen=True, slots=True)
class StandbyRow:
    """A coordinator that waits."""

    directory: str
    holder: str
    since: float
    age_s: float
    """Seconds since it reported."""
    behind_bytes: int
    """Bytes of the newest checkpoints that it has not copied yet."""


def find(db: Connection) -> Leader | None:
    """The newest leader; None before the first one."""
    row = db.execute(select(leadership, (leadership.c.until - NOW).label("left_s"))).first()
    return None if row is None else Leader(row.epoch, row.holder, row.directory, row.since, float(row.left_s))


def is_held(leader: Leader, home: Home, terms: LeaseTerms) -> bool:
    """Whether the lease keeps a coordinator with this state directory out.

    A coordinator with the same directory has ended, because this one has the directory's lock.
    """
    same_directory = bool(home.id) and leader.directory == home.id
    return leader.left_s > 0 and not same_directory and leader.epoch != terms.gone


def require_free(db: Connection, home: Home, terms: LeaseTerms) -> Leader | None:
    """Raises LedgerHeld while another coordinator leads. Returns the leader before, whose connections are ended."""
    leader = find(db)
    if leader is None:
        return None
    if is_held(leader, home, terms):
        raise LedgerHeld(
            f"another coordinator has the ledger: {leader.holder}; stop it first, or give this one a database or "
            "schema of its own, or an object store (`storage`), with which it waits as a standby"
        )
    # One that hangs in a transaction would keep the epoch locked.
    end_marked(db, leader.epoch)
    return leader


def take(db: Connection, home: Home, epoch: int, terms: LeaseTerms, before: Leader | None) -> None:
    """Write the new leader, with a line of the history."""
    holder = process_name()
    db.execute(delete(leadership))
    db.execute(delete(standbys).where(standbys.c.directory == home.id))
    row = {"epoch": epoch, "holder": holder, "directory": home.id, "since": NOW, "until": NOW + terms.seconds}
    db.execute(insert(leadership).values(**row))
    if before is not None and before.directory != home.id:
        detail = f"{holder} leads with epoch {epoch}; before: {before.holder}"
        line = {"actor": "coordinator", "event": "leader_changed", "subject": "coordinator", "detail": detail}
        db.execute(insert(schema.history).values(time=NOW, **line))


def renew(db: Connection, epoch: int, seconds: float) -> bool:
    """Extend the lease. Returns False if another coordinator leads."""
    renewed = change(leadership).where(leadership.c.epoch == epoch).values(until=NOW + seconds)
    return db.execute(renewed).rowcount == 1


def release(db: Connection, epoch: int) -> None:
    """Give the lease back: a standby takes it at once."""
    db.execute(change(leadership).where(leadership.c.epoch == epoch).values(until=0.0))


def note_standby(db: Connection, directory: str, behind_bytes: int) -> None:
    """Write that a standby waits."""
    facts = {"holder": process_name(), "seen": NOW, "behind_bytes": behind_bytes}
    known = db.execute(change(standbys).where(standbys.c.directory == directory).values(**facts))
    if not known.rowcount:
        db.execute(insert(standbys).values(directory=directory, since=NOW, **facts))


def forget_standby(db: Connection, directory: str) -> None:
    """A standby has ended."""
    db.execute(delete(standbys).where(standbys.c.directory == directory))


def list_standbys(db: Connection) -> list[StandbyRow]:
    """The standbys that have reported lately."""
    age = (NOW - standbys.c.seen).label("age_s")
    rows = db.execute(select(standbys, age).where(standbys.c.seen > NOW - STANDBY_SEEN_S).order_by(standbys.c.since))
    return [StandbyRow(row.directory, row.holder, row.since, float(row.age_s), row.behind_bytes) for row in rows]
