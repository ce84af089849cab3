"""The lease of a ledger in PostgreSQL: who leads, until when by the database's clock, and which standbys wait.

The lease decides when a standby may take over. It is no protection: that is the epoch, which every transaction checks.
Each taking of the lease is a new opening of the ledger and so a new epoch. The leader's connections carry a mark, an
advisory lock with the number of its epoch that nobody waits for. When all marks of an epoch are gone, its leader has
probably been killed, and the lease need not be waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from fl_server.store.database import schema
from fl_server.store.database.engines import end_marked, process_name
from fl_server.store.errors import LedgerHeld

leadership = sa.Table(
    "leadership",
    schema.metadata,
    sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("holder", schema.Words, nullable=False),
    sa.Column("directory", sa.String(64), nullable=False),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("until", sa.Double, nullable=False),
)
"""One row: the newest leader. Times are the database's, as Unix seconds."""
standbys = sa.Table(
    "standbys",
    schema.metadata,
    sa.Column("directory", sa.String(64), primary_key=True),
    sa.Column("holder", schema.Words, nullable=False),
    sa.Column("since", sa.Double, nullable=False),
    sa.Column("seen", sa.Double, nullable=False),
    sa.Column("behind_bytes", schema.BigId, nullable=False),
)
NOW = sa.func.extract("epoch", sa.func.clock_timestamp())
STANDBY_SEEN_S = 5.0
"""A standby that has not reported for so long is not counted on."""


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


def find(db: sa.Connection) -> Leader | None:
    """The newest leader; None before the first one."""
    row = db.execute(sa.select(leadership, (leadership.c.until - NOW).label("left_s"))).first()
    return None if row is None else Leader(row.epoch, row.holder, row.directory, row.since, float(row.left_s))


def is_held(leader: Leader, directory: str, terms: LeaseTerms) -> bool:
    """Whether the lease keeps a coordinator out. directory: the id of its state directory; "" without one.

    A coordinator with the same directory has ended, because this one has the directory's lock.
    """
    same_directory = bool(directory) and leader.directory == directory
    return leader.left_s > 0 and not same_directory and leader.epoch != terms.gone


def require_free(db: sa.Connection, directory: str, terms: LeaseTerms) -> Leader | None:
    """Raises LedgerHeld while another coordinator leads. Returns the leader before, whose connections are ended."""
    leader = find(db)
    if leader is None:
        return None
    if is_held(leader, directory, terms):
        raise LedgerHeld(
            f"another coordinator has the ledger: {leader.holder}; stop it first, or give this one a database or "
            "schema of its own, or an object store (`storage`), with which it waits as a standby"
        )
    # One that hangs in a transaction would keep the epoch locked.
    end_marked(db, leader.epoch)
    return leader


def take(db: sa.Connection, directory: str, epoch: int, terms: LeaseTerms, before: Leader | None) -> None:
    """Write the new leader, with a line of the history."""
    holder = process_name()
    db.execute(sa.delete(leadership))
    db.execute(sa.delete(standbys).where(standbys.c.directory == directory))
    row = {"epoch": epoch, "holder": holder, "directory": directory, "since": NOW, "until": NOW + terms.seconds}
    db.execute(sa.insert(leadership).values(**row))
    if before is not None and before.directory != directory:
        detail = f"{holder} leads with epoch {epoch}; before: {before.holder}"
        line = {"actor": "coordinator", "event": "leader_changed", "subject": "coordinator", "detail": detail}
        db.execute(sa.insert(schema.history).values(time=NOW, **line))


def renew(db: sa.Connection, epoch: int, seconds: float) -> bool:
    """Extend the lease. Returns False if another coordinator leads."""
    renewed = sa.update(leadership).where(leadership.c.epoch == epoch).values(until=NOW + seconds)
    return db.execute(renewed).rowcount == 1


def release(db: sa.Connection, epoch: int) -> None:
    """Give the lease back: a standby takes it at once."""
    db.execute(sa.update(leadership).where(leadership.c.epoch == epoch).values(until=0.0))


def note_standby(db: sa.Connection, directory: str, behind_bytes: int) -> None:
    """Write that a standby waits."""
    facts = {"holder": process_name(), "seen": NOW, "behind_bytes": behind_bytes}
    known = db.execute(sa.update(standbys).where(standbys.c.directory == directory).values(**facts))
    if not known.rowcount:
        db.execute(sa.insert(standbys).values(directory=directory, since=NOW, **facts))


def forget_standby(db: sa.Connection, directory: str) -> None:
    """A standby has ended."""
    db.execute(sa.delete(standbys).where(standbys.c.directory == directory))


def list_standbys(db: sa.Connection) -> list[StandbyRow]:
    """The standbys that have reported lately."""
    age = (NOW - standbys.c.seen).label("age_s")
    rows = db.execute(sa.select(standbys, age).where(standbys.c.seen > NOW - STANDBY_SEEN_S).order_by(standbys.c.since))
    return [StandbyRow(row.directory, row.holder, row.since, float(row.age_s), row.behind_bytes) for row in rows]
