"""The ledger in a SQL database with SQLAlchemy Core: the same statements on every backend."""

from __future__ import annotations

from fl_server.store.database.ledger_audit import AuditLedger
from fl_server.store.database.ledger_certificates import CertificateLedger
from fl_server.store.database.ledger_clients import ClientLedger
from fl_server.store.database.ledger_commits import CommitLedger
from fl_server.store.database.ledger_removal import Removal
from fl_server.store.database.ledger_rounds import RoundLedger
from fl_server.store.database.ledger_runs import RunLedger


class Store(RunLedger, RoundLedger, CommitLedger, ClientLedger, Removal, CertificateLedger, AuditLedger):
    """The ledger: runs, attempts, admitted updates, accepted lists, commits, clients, certificates and history.

    Its methods are blocking and are called from one worker thread. Each write is one transaction, durable against
    SIGKILL when it returns, and most take the line of history that explains the change. Changes of a run by an
    operator, accepted lists and commits are fsynced; with durability "power" every write is. Tensors are stored
    elsewhere: updates in the spool, committed models in checkpoints.
    """
