"""Which state directory a ledger belongs to, and which coordinator may write it.

Checkpoints and ledger only make sense together, so the state directory and the ledger store each other's id. A lock
usually keeps a second coordinator out, but a lock can be lost: with the connection that holds it, behind a pooler, on a
network disk. Therefore the ledger counts its openings: the epoch. Each write checks that the epoch is still its own.
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
