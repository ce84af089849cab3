"""How many files the process may have open, and how many of them are left to connections.

A connection is an open file, and so are the ledger, a checkpoint that is written and both files of an update that comes
in. So connections get a share, and the rest is kept for what must not fail.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

import structlog

from fl_server.config import ConnectionsConfig

log = structlog.get_logger()

OWN_FILES = 64
"""Open in a coordinator that has nothing to do: measured 45."""
MOST_KEPT = 4096
"""Kept for files at most: 2,000 updates that come in at once."""
MOST = 1 << 20
"""Where the process has no limit."""


@dataclass(frozen=True, slots=True)
class Connections:
    """Connections at once, by port."""

    clients: int
    admin: int
    health: int
    metrics: int


def allow_open_files(clients: int, wanted: ConnectionsConfig) -> Connections:
    """Raise the process's own limit as far as it may go, share it out, and say so if that is not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = MOST if hard == resource.RLIM_INFINITY else hard
    shared = share(limit, clients, wanted)
    if shared.clients < clients:
        todo = "raise LimitNOFILE (systemd) or `ulimit -Hn`, or lower limits.max_clients"
        log.warning("few_open_files", limit=limit, connections=shared.clients, max_clients=clients, todo=todo)
    return shared


def share(limit: int, clients: int, wanted: ConnectionsConfig) -> Connections:
    """Connections for each port, of a process with so many open files.

    A client may have two connections while its certificate is renewed, and others knock meanwhile: an eighth more than
    there are clients.
    """
    admin, health = (min(each, max(4, limit // 16)) for each in (wanted.admin, wanted.health))
    metrics = min(wanted.metrics, max(4, limit // 32))
    left = limit - OWN_FILES - min(MOST_KEPT, limit // 4) - admin - health - metrics
    return Connections(max(4, min(clients + clients // 8 + 64, left)), admin, health, metrics)
