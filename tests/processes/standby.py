"""Two coordinators of one ledger, one of which leads, and daemons that know both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.processes.federation import Coordinator, Daemon, Fleet
from tests.processes.process import Workspace, eventually, write_toml
from tests.processes.relay import free_port

NAMES = ("one", "two")


class Candidate(Coordinator):
    """A coordinator that leads or waits; its ports are chosen before it starts."""

    module = "fl_server"

    def __init__(self, workspace: Workspace, name: str, settings: Mapping[str, Any]) -> None:
        ports = {port: f"127.0.0.1:{free_port()}" for port in ("listen", "admin_listen", "metrics_listen")}
        super().__init__(workspace, name, {**ports, **settings})
        self._module = self.module

    def stand_by(self) -> Candidate:
        """Start it and wait until it waits for the lease."""
        before = len(self.events("standing_by"))
        self.start()
        self.logged("standing_by", before + 1)
        return self

    def leads(self) -> bool:
        """Whether it runs and has served since its last start."""
        return self.exit_code is None and bool(self.events("serving", pid=self.pid))


class Pair(Fleet):
    """Two coordinators on one PostgreSQL ledger and one object store, and their daemons. `server` is the leader."""

    candidate: type[Candidate] = Candidate

    def __init__(
        self, workspace: Workspace, size: int, own: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any
    ) -> None:
        """own: settings of one coordinator, by its name."""
        self.workspace = workspace
        self.candidates = {
            name: self.candidate(workspace, name, {**settings, **(own or {}).get(name, {})}) for name in NAMES
        }
        self.server: Candidate = self.candidates["one"].serve()
        self.standby.stand_by()
        # Only a leader that knows of a standby ends when it loses its database.
        eventually(lambda: b"fl_standbys 1.0" in self.server.metrics(), "the leader has heard of the standby")
        self.daemons = {f"edge-{index}": self.daemon(index, size).start() for index in range(size)}
        self.until_all_present()

    @property
    def standby(self) -> Candidate:
        """The one that does not lead."""
        return next(each for each in self.candidates.values() if each is not self.server)

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon that knows both, without starting it."""
        daemon = super().daemon(index, size)
        daemon.configure(standbys=[self.candidates["two"].address])
        daemon.settings["server"] = self.candidates["one"].address
        write_toml(daemon.config, daemon.settings)
        return daemon

    def taken_over(self) -> Candidate:
        """Wait until the other one serves, and call it the leader. Returns the one before."""
        before, after = self.server, self.standby
        eventually(after.leads, f"{after.name} serves")
        self.server = after
        return before
