"""A coordinator and honest daemons over mTLS, under attack by hostile programs.

The honest run selects its clients by a label. A hostile client joins its cohort only if a test wants that. The run's
models are known beforehand, bit for bit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from fl_ops.admin.settings import Certificates
from tests.processes.certificates import Pki, credentials, section
from tests.processes.enrollment import write_key
from tests.processes.federation import Daemon, SecureCoordinator
from tests.processes.process import Workspace
from tests.processes.raw_client import RawClient

HONEST = {"site": "honest"}
"""Labels of the honest daemons and of their runs."""
SIZE = 3
STEP_S = 0.02
"""Seconds of an honest training step: a run must be long enough for an attack."""


class Federation:
    """One coordinator and SIZE honest daemons as real processes, started by the constructor."""

    server_class: ClassVar[type[SecureCoordinator]] = SecureCoordinator

    def __init__(self, workspace: Workspace, *, open_files: int | None = None, **settings: Any) -> None:
        """settings: keys of server.toml in addition to the defaults; open_files: the coordinator's limit."""
        self.workspace = workspace
        self.pki = Pki(workspace.folder / "pki")
        ports = {"health_listen": "127.0.0.1:0", "enroll_listen": "127.0.0.1:0"}
        authority = {"ca_cert": str(self.pki.ca), "ca_key": str(write_key(self.pki))}
        self.server = self.server_class(workspace, self.pki, {**ports, "enrollment": authority, **settings})
        self.server.open_files = open_files
        self.server.serve()
        self.daemons = {f"honest-{index}": self._daemon(index).start() for index in range(SIZE)}
        for name in self.daemons:
            self.server.until_present(name)
        self._runs = 0

    def _daemon(self, index: int) -> Daemon:
        name = f"honest-{index}"
        return Daemon(
            self.workspace,
            self.server,
            name,
            insecure=False,
            tls=section(self.pki.issue("client", name)),
            shard={"partition": {"method": "iid", "clients": SIZE, "seed": 1}, "index": index},
            options={"step_s": STEP_S},
            labels=HONEST,
        )

    def begin_run(self, **sections: Any) -> str:
        """Start a run of the honest daemons only; returns its id. It has the same digests every time."""
        self._runs += 1
        run_id = self.server.create(f"honest-run-{self._runs}", labels=HONEST, **sections)
        self.server.until(run_id, lambda run: run.rounds_done or run.cohort, "it begins")
        return run_id

    def hostile(self, name: str = "mallory", role: str = "client") -> Certificates:
        """Certificate and key of an enrolled attacker."""
        return self.pki.issue(role, name)

    def raw(self, name: str = "mallory") -> RawClient:
        """A raw client with a certificate of that name; a context manager."""
        return RawClient(self.server.address, name, credentials(self.hostile(name)))

    def still_works(self, undisturbed: list[str], run_id: str) -> None:
        """Check that the honest run ends with the bits of an undisturbed run, and that no process has ended."""
        assert self.server.digests(run_id) == undisturbed
        assert self.server.exit_code is None
        assert all(daemon.exit_code is None for daemon in self.daemons.values())


class Memory:
    """Resident memory of a process, in MiB, read from Linux."""

    def __init__(self, pid: int) -> None:
        self._proc = Path("/proc") / str(pid)

    @classmethod
    def of_this_process(cls) -> Memory:
        """Memory of the calling process."""
        return cls(os.getpid())

    def now(self) -> float:
        """Current resident memory."""
        return self._field("VmRSS")

    def peak(self) -> float:
        """Largest resident memory since `forget_peak`, or since the start."""
        return self._field("VmHWM")

    def forget_peak(self) -> None:
        """Reset the peak."""
        (self._proc / "clear_refs").write_text("5")

    def _field(self, name: str) -> float:
        lines = (self._proc / "status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
