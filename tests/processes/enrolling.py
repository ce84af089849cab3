"""Daemons that got their certificates for tokens and renew them."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.processes.enrollment import EnrollingCoordinator
from tests.processes.federation import Daemon
from tests.processes.process import Workspace


def enrolled_daemon(server: EnrollingCoordinator, workspace: Workspace, name: str, **settings: Any) -> Daemon:
    """A daemon with a certificate that it renews. It is not started."""
    state_dir = workspace.folder / f"{name}-state"
    assert server.enroll(name, server.create_token(name), state_dir) == 0
    daemon = Daemon(workspace, server, name, **{"insecure": False, "tls": renewed(server, state_dir), **settings})
    daemon.settings.pop("client_id")
    daemon.configure()
    return daemon


def renewed(server: EnrollingCoordinator, state_dir: Path) -> dict[str, Any]:
    """A daemon's [tls] section."""
    current = state_dir / "tls" / "current"
    files = {"ca": str(current / "ca.crt"), "cert": str(current / "tls.crt"), "key": str(current / "tls.key")}
    return {**files, "renew": True, "enroll_server": server.enroll_address}


def samples(address: str, name: str) -> dict[tuple[str, ...], float]:
    """A metric's samples of one process: label values -> value."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    return {
        tuple(each.labels.values()): each.value for family in families for each in family.samples if each.name == name
    }
