"""A coordinator and daemons with certificates, for rounds with secure aggregation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.processes.certificates import Pki, section
from tests.processes.federation import Daemon, Fleet, SecureCoordinator
from tests.processes.process import Workspace


def sections(clients: int, **secure: Any) -> dict[str, Any]:
    """Two rounds of a tiny model, in each of which all clients are drawn."""
    return {
        "algorithm": {"name": "fedavg", "parameters": {"weights": "uniform"}},
        "local": {"epochs": None, "steps": 3},
        "round": {"clients_per_round": clients, "min_clients": clients, "quorum": 2 * clients // 3 + 1},
        "secure_aggregation": {"clip": 0.5, "max_dropped": 0.2, "stage_s": 60.0, **secure},
        "stop": {"rounds": 2},
    }


class SecureFleet(Fleet):
    """A coordinator that requires certificates, and daemons with certificates of its authority."""

    def __init__(
        self, workspace: Workspace, pki: Pki, size: int, settings: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """settings: of the coordinator. options: of the daemons' task."""
        self.workspace, self._pki, self._options = workspace, pki, options
        self.server = SecureCoordinator(
            workspace, pki, {"limits": {"reattach_grace_s": 30.0}, **(settings or {})}
        ).serve()
        self.daemons = {f"edge-{number}": self.daemon(number, size).start() for number in range(size)}
        self.until_all_present()

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon without starting it."""
        daemon = super().daemon(index, size)
        daemon.settings["task"]["options"] |= self._options
        daemon.configure(insecure=False, tls=section(self._pki.issue("client", daemon.client_id)))
        return daemon

    def at_phases(self, run: str, phases: Sequence[str], act: Callable[[str], None]) -> None:
        """Act once in each of these phases, in the round with its number. Training goes on when the run is watched."""
        for number, phase in enumerate(phases):
            with self.server.admin() as admin:
                for status in admin.runs.watch_run(run):
                    self.release()  # not before the events are watched
                    if status.run.rounds_done == number and status.run.phase == phase:
                        break
            act(phase)
