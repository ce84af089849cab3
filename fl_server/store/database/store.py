"""The ledger in a SQL database with SQLAlchemy Core, the same statements on every backend; and how it is opened."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from sqlalchemy import create_engine

from fl_server.store.database.ledger_audit import AuditLedger
from fl_server.store.database.ledger_certificates import CertificateLedger
from fl_server.store.database.ledger_clients import ClientLedger
from fl_server.store.database.ledger_objects import ObjectLedger
from fl_server.store.database.ledger_releases import ReleaseLedger
from fl_server.store.database.ledger_rounds import RoundLedger
from fl_server.store.database.ledger_runs import CommitLedger, Removal, RunLedger
from fl_server.store.database.ledger_stages import StageLedger
from fl_server.store.database.ownership import ANYWHERE, Home, LeaseTerms
from fl_server.store.database.transactions import prepare_file, server_engine
from fl_server.store.errors import StoreError
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
