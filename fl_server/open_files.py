"""How many files the process may have open: a client that is attached is one of them."""

from __future__ import annotations

import resource

import structlog

log = structlog.get_logger()


def allow_open_files(clients: int) -> None:
    """Raise the process's own limit as far as it may go, and say so if that is not enough for so many clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < clients:
        todo = "raise LimitNOFILE (systemd) or `ulimit -Hn`, or lower limits.max_clients"
        log.warning("few_open_files", limit=hard, max_clients=clients, todo=todo)
