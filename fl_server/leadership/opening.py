"""Opens what a coordinator has alone: its state directory, and the ledger with the right to write it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fl_server.settings.config import ServerConfig
from fl_server.store.database.lease import LeaseTerms
from fl_server.store.database.store import Store, open_ledger
from fl_server.store.state_directory import DirectoryLock, lock_directory


@dataclass(frozen=True, slots=True)
class Opened:
    """A locked state directory and its ledger."""

    lock: DirectoryLock
    store: Store


def open_state(config: ServerConfig, lock: DirectoryLock | None = None, gone: int = 0) -> Opened:
    """Lock the state directory, unless that is done, and open the ledger, which belongs to it from now on.

    gone: the epoch of a leader that is known to have ended. Raises LedgerHeld while another coordinator leads.
    """
    locked = lock or lock_directory(config.state_dir)
    home = replace(locked.home, storage=config.storage or "")
    terms = LeaseTerms(config.lease_s, gone)
    try:
        store = open_ledger(ledger_url(config), config.state_dir, config.durability, home, terms)
    except BaseException:
        if lock is None:
            locked.release()
        raise
    locked.keep_ledger(store.coordinator_id)
    return Opened(locked, store)


def ledger_url(config: ServerConfig) -> str | None:
    """The URL of a ledger in PostgreSQL; None for SQLite."""
    return None if config.ledger is None else config.ledger.get_secret_value()


def may_stand_by(config: ServerConfig) -> bool:
    """Whether a second coordinator may wait: it can read all that the leader has written."""
    return config.ledger is not None and config.storage is not None
