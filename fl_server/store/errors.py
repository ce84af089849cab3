"""The errors of the store: ledger, checkpoints, spool and state directory."""

from __future__ import annotations


class StoreError(Exception):
    """The store could not do what was asked; nothing was changed."""


class StoreFull(StoreError):
    """The disk is full, or writing is not permitted. Everything stored before stays valid."""


class NoOpenFiles(StoreFull):
    """This process or this machine cannot open another file. The error passes when other files are closed."""


class NoCheckpoint(StoreError):
    """A round has no checkpoint: it was removed, or never written."""


class StoreUnavailable(StoreFull):
    """The database cannot be reached, or another coordinator owns it. As with a full disk, a retry may succeed.

    A connection that is lost while a transaction ends leaves the result unknown: writing the same again is right.
    """


class LedgerHeld(StoreUnavailable):
    """Another coordinator has the lease of the ledger."""


class StoreTakenOver(StoreError):
    """Another coordinator opened the ledger later. The state of this coordinator is stale, and it must end."""
