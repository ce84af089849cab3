"""Rounds with secure aggregation, with a coordinator, daemons and certificates as they run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.processes.certificates import Pki, section
from tests.processes.federation import Daemon, SecureCoordinator
from tests.processes.process import Workspace

SIZE = 5
SECURE: dict[str, Any] = {
    "algorithm": {"name": "fedavg", "parameters": {"weights": "uniform"}},
    "local": {"epochs": None, "steps": 3},
    "round": {"clients_per_round": SIZE, "min_clients": SIZE, "quorum": 4},
    "secure_aggregation": {"clip": 0.5, "max_dropped": 0.2, "stage_s": 20.0},
    "stop": {"rounds": 2},
}


class SecureFleet:
    """A coordinator that requires certificates, and daemons with certificates of its authority."""

    def __init__(self, workspace: Workspace, pki: Pki) -> None:
        self.server = SecureCoordinator(workspace, pki, {"limits": {"reattach_grace_s": 3.0}}).serve()
        self.daemons = {f"edge-{number}": self._daemon(workspace, pki, number).start() for number in range(SIZE)}
        self.until_here()

    def _daemon(self, workspace: Workspace, pki: Pki, number: int) -> Daemon:
        shard = {"partition": {"method": "iid", "clients": SIZE, "seed": 1}, "index": number}
        files = section(pki.issue("client", f"edge-{number}"))
        return Daemon(workspace, self.server, f"edge-{number}", shard=shard, insecure=False, tls=files)

    def until_here(self) -> None:
        """Wait until every daemon is connected."""
        self.server.until_present(*self.daemons)


@pytest.fixture(scope="module")
def fleet(module_workspace: Workspace, pki: Pki) -> SecureFleet:
    """A coordinator and five daemons."""
    return SecureFleet(module_workspace, pki)


def test_a_run_completes(fleet: SecureFleet) -> None:
    """Both rounds count all five clients."""
    run = fleet.server.create("summed", **SECURE)
    fleet.server.completed(run)
    assert [summary.accepted for summary in fleet.server.rounds(run)] == [SIZE, SIZE]
