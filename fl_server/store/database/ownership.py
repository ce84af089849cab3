"""The owner of a ledger: its state directory, and the coordinator that opened it last.

Checkpoints and ledger only make sense together, so the state directory and the ledger store each other's id. A lock
usually keeps a second coordinator out, but a lock can be lost: with the connection that holds it, behind a pooler, on a
network disk. Therefore the ledger counts its openings, and each write checks that its own opening is still the last: a
coordinator that was replaced cannot change anything.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import Connection, insert, select
from sqlalchemy import update as change

from fl_server.store.database import schema
from fl_server.store.errors import StoreError, StoreTakenOver


@dataclass(frozen=True, slots=True)
class Home:
    """The state directory of a ledger."""

    id: str
    """Id of the directory; "" without a directory, and then any ledger fits."""
    ledger: str = ""
    """Id of its ledger; "" before the first ledger."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write, until another coordinator opens the ledger."""

    coordinator_id: str
    opening: int


def identify(db: Connection) -> str:
    """The ledger's own id."""
    return str(db.execute(select(schema.identity.c.coordinator_id)).scalar())


def claim(db: Connection, home: Home) -> Claim:
    """Take the right to write from earlier openings. Raises StoreError if the ledger belongs to another directory."""
    table = schema.identity
    found = db.execute(select(table)).first()
    if found is None:
        db.execute(insert(table).values(coordinator_id=uuid.uuid4().hex, directory="", openings=0))
        found = db.execute(select(table)).one()
    _require_together(home, found.coordinator_id, found.directory)
    opening = found.openings + 1
    db.execute(change(table).values(openings=opening, directory=found.directory or home.id))
    return Claim(found.coordinator_id, opening)


def require_claim(db: Connection, mine: Claim) -> None:
    """Raises StoreTakenOver if the ledger was opened since. Until the transaction ends, it cannot be opened."""
    opening = db.execute(select(schema.identity.c.openings).with_for_update(read=True)).scalar()
    if opening != mine.opening:
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
