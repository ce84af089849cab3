"""Divides the process's open files between connections and the coordinator's own files.

A connection is an open file, and so are the ledger, a checkpoint that is written, and the two files of an update that
is received. Connections get a share; the rest is reserved for files that must not fail.
"""

from __future__ import annotations

import resource
from collections.abc import Collection
from dataclasses import dataclass

import structlog

from fl_server.limits_config import ConnectionsConfig

log = structlog.get_logger()

OWN_FILES = 64
"""Open files of an idle coordinator: 45 were measured."""
MOST_KEPT = 4096
"""Largest reserve for files: 2,000 updates at once."""
MOST = 1 << 20
"""Used where the process has no limit."""


@dataclass(frozen=True, slots=True)
class Connections:
    """Connections at once, by port."""

    clients: int
    admin: int
    health: int
    metrics: int
    enrollment: int = 0
    """0: the port is off."""


def allow_open_files(clients: int, wanted: ConnectionsConfig, also: Collection[str] = ()) -> Connections:
    """Raise the process's soft limit to its hard limit, divide it, and log a warning if it is too low.

    also: settings of the ports that are on beside the usual ones: "enroll_listen", "token_listen".
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = MOST if hard == resource.RLIM_INFINITY else hard
    shared = share(limit, clients, wanted, also)
    if shared.clients < clients:
        todo = "raise LimitNOFILE (systemd) or `ulimit -Hn`, or lower limits.max_clients"
        log.warning("few_open_files", limit=limit, connections=shared.clients, max_clients=clients, todo=todo)
    return shared


def share(limit: int, clients: int, wanted: ConnectionsConfig, also: Collection[str] = ()) -> Connections:
    """Connections for each port of a process that may open `limit` files.

    There are an eighth more than clients: a client may have two connections while its certificate is renewed.
    """
    admin, health = (min(each, max(4, limit // 16)) for each in (wanted.admin, wanted.health))
    metrics = min(wanted.metrics, max(4, limit // 32))
    operators = 2 * admin if "token_listen" in also else admin
    enrollment = min(wanted.enrollment, max(4, limit // 16)) if "enroll_listen" in also else 0
    left = limit - OWN_FILES - min(MOST_KEPT, limit // 4) - operators - health - metrics - enrollment
    return Connections(max(4, min(clients + clients // 8 + 64, left)), admin, health, metrics, enrollment)
