"""Whose a ledger is: the state directory that it goes with, and of all who opened it the last.

A directory's checkpoints mean nothing beside another ledger, and a ledger's rounds nothing beside other checkpoints; so
each of the two remembers the other's id. Locks keep a second coordinator out as a rule, but a lock can be lost: with
the connection that holds it, behind a pooler, on a network disk. Therefore every opening is counted in the ledger, and
each write looks whether its own is still the last: a coordinator that was replaced can change nothing any more.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select
from sqlalchemy import update as change

from fl_server.store import schema
from fl_server.store.base import StoreError, StoreTaken


@dataclass(frozen=True, slots=True)
class Home:
    """A state directory, as far as its ledger is concerned."""

    id: str
    """The directory's own; "" where there is none, and then any ledger will do."""
    ledger: str = ""
    """Id of its ledger; "" before the first."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write, until somebody else opens the ledger."""

    coordinator_id: str
    opening: int


def identify(db: Connection) -> str:
    """The ledger's own id."""
    return str(db.execute(select(schema.identity.c.coordinator_id)).scalar())


def claim(db: Connection, home: Home) -> Claim:
    """From now on nobody else may write. Raises StoreError if ledger and directory do not belong together."""
    table = schema.identity
    found = db.execute(select(table)).first()
    if found is None:
        db.execute(insert(table).values(coordinator_id=uuid.uuid4().hex))
        found = db.execute(select(table)).one()
    _require_together(home, found.coordinator_id, found.directory)
    opening = found.openings + 1
    db.execute(change(table).values(openings=opening, directory=found.directory or home.id))
    return Claim(found.coordinator_id, opening)


def require_claim(db: Connection, mine: Claim) -> None:
    """Raises StoreTaken if somebody opened the ledger since; until the transaction ends nobody can."""
    opening = db.execute(select(schema.identity.c.openings).with_for_update(read=True)).scalar()
    if opening != mine.opening:
        raise StoreTaken(
            "another coordinator has opened the ledger since this one did, and goes on with its runs: see that only "
            "one is started on a ledger; this one has changed nothing since"
        )


def _require_together(home: Home, ledger: str, directory: str) -> None:
    if home.ledger and home.ledger != ledger:
        raise StoreError(
            f"the state directory belongs to the ledger {home.ledger}, and this one is {ledger}: its checkpoints go "
            "with its own, so let `ledger` name that one again, or name a new state directory"
        )
    if home.id and directory and home.id != directory:
        raise StoreError(
            f"the ledger belongs to the state directory with the id {directory}, and this one has {home.id}: its "
            "checkpoints are there, so name that directory, or an empty database or schema for this one"
        )
