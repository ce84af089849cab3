"""A coordinator with honest daemons, over mTLS, beside which hostile programs do what they want.

The honest run chooses its clients by a label, so that no hostile client is ever one of its cohort unless a test wants
it to be: what it ends with is then known beforehand, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from fl_ops.settings import Certificates
from tests.hostile.certificates import Pki, credentials, section
from tests.integration.harness import PRESENT, Coordinator, Daemon
from tests.integration.processes import Place, eventually
from tests.integration.raw_client import RawClient

HONEST = {"site": "honest"}
"""Labels of the honest daemons, and of the runs that want no others."""
SIZE = 3
STEP_S = 0.02
"""What an honest training step takes: a run must be long enough to be attacked."""


class SecureCoordinator(Coordinator):
    """A coordinator that wants certificates, and whose operator is alice."""

    def __init__(self, place: Place, pki: Pki, settings: Mapping[str, Any] | None = None) -> None:
        own = pki.issue("server", "coordinator")
        self._alice = pki.issue("admin", "alice")
        tls = {"cert": str(own.cert), "key": str(own.key), "client_ca": str(pki.ca)}
        super().__init__(place, settings={"insecure": False, "tls": tls, **(settings or {})})

    def admin(self, certificates: Certificates | None = None) -> Any:
        return super().admin(certificates or self._alice)


class Federation:
    """One coordinator and SIZE honest daemons, as real processes; started when it is made."""

    server_class: ClassVar[type[SecureCoordinator]] = SecureCoordinator

    def __init__(self, place: Place, *, open_files: int | None = None, **settings: Any) -> None:
        """settings: keys of server.toml beside or in place of the tests' own; open_files: the coordinator's limit."""
        self.place = place
        self.pki = Pki(place.folder / "pki")
        self.server = self.server_class(place, self.pki, {"health_listen": "127.0.0.1:0", **settings})
        self.server.open_files = open_files
        self.server.serve()
        self.daemons = {f"honest-{index}": self._daemon(index).start() for index in range(SIZE)}
        for name in self.daemons:
            eventually(lambda name=name: self.server.client(name).state == PRESENT, f"{name} attends")
        self._runs = 0

    def _daemon(self, index: int) -> Daemon:
        name = f"honest-{index}"
        return Daemon(
            self.place,
            self.server,
            name,
            insecure=False,
            tls=section(self.pki.issue("client", name)),
            shard={"partition": {"method": "iid", "clients": SIZE, "seed": 1}, "index": index},
            options={"step_s": STEP_S},
            labels=HONEST,
        )

    def begin_run(self, **sections: Any) -> str:
        """A run of the honest daemons alone, under way when this returns; its id. The same digests every time."""
        self._runs += 1
        run_id = self.server.create(f"honest-run-{self._runs}", labels=HONEST, **sections)
        self.server.until(run_id, lambda run: run.rounds_done or run.cohort, "it begins")
        return run_id

    def hostile(self, name: str = "mallory", role: str = "client") -> Certificates:
        """Certificate and key of somebody who was let in and means harm."""
        return self.pki.issue(role, name)

    def raw(self, name: str = "mallory") -> RawClient:
        """A client by hand with a certificate of that name; use it in a with block."""
        return RawClient(self.server.address, name, credentials(self.hostile(name)))

    def still_works(self, undisturbed: list[str], run_id: str) -> None:
        """The honest run ends with the bits that it has when nobody is hostile, and nobody had to be started again."""
        assert self.server.digests(run_id) == undisturbed
        assert self.server.exit_code is None
        assert all(daemon.exit_code is None for daemon in self.daemons.values())


class Memory:
    """Resident memory of a process, in MiB, read from Linux."""

    def __init__(self, pid: int) -> None:
        self._proc = Path("/proc") / str(pid)

    def now(self) -> float:
        """What it has."""
        return self._field("VmRSS")

    def peak(self) -> float:
        """The most that it had since `forget_peak`, or since its start."""
        return self._field("VmHWM")

    def forget_peak(self) -> None:
        """Begin a new peak."""
        (self._proc / "clear_refs").write_text("5")

    def _field(self, name: str) -> float:
        lines = (self._proc / "status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
