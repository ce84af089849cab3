"""The ledger in a SQL database: `Store` with SQLAlchemy Core, the same statements on every backend."""

from __future__ import annotations

from fl_server.store.database.ledger_clients import ClientLedger
from fl_server.store.database.ledger_commits import CommitLedger
from fl_server.store.database.ledger_removal import Removal
from fl_server.store.database.ledger_rounds import RoundLedger
from fl_server.store.database.ledger_runs import RunLedger
from fl_server.store.database.security.ledger_audit import AuditLedger
from fl_server.store.database.security.ledger_certificates import CertificateLedger


class SqlStore(RunLedger, RoundLedger, CommitLedger, ClientLedger, Removal, CertificateLedger, AuditLedger):
    """`Store` over a SQLAlchemy engine or database URL; `Store` documents the methods.

    Each method is one transaction, durable against SIGKILL when it returns. Changes of a run by an operator, accepted
    lists and commits are fsynced; with durability "power" every write is.
    """
