"""A place for a benchmark: a folder, real processes in it with production settings, what the kernel says of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil

from fl_ops import ca
from fl_ops.admin_client import AdminClient
from fl_ops.demo.processes import Child, Processes
from fl_ops.settings import Certificates, Connection

PATIENCE_S = 600.0
_HOST = "127.0.0.1"
TASK = "benchmarks.constant_task:ConstantTask"
"""The one task of one's own that the coordinator may load."""


class Place:
    """A folder with a coordinator and daemons; plain text, or mTLS with an authority of its own."""

    def __init__(self, folder: Path, processes: Processes, *, tls: bool) -> None:
        self.folder = folder
        self.processes = processes
        self._authority = None
        if tls:
            now = datetime.now(UTC) - timedelta(minutes=5)
            self._validity = ca.Validity(now, 1)
            self._authority = ca.make_authority("benchmark", ca.Validity(now, 2))
            (folder / "ca.pem").write_bytes(ca.certificate_pem(self._authority.certificate))

    @property
    def tls(self) -> bool:
        """Whether everybody has to have a certificate."""
        return self._authority is not None

    def serve(self, ports: tuple[int, int] = (0, 0), extra: str = "") -> Server:
        """Start the coordinator. ports: for clients and for admins; 0 takes a free one. extra: more TOML."""
        listen, admin = ports
        settings = (
            f'state_dir = "{self.folder / "state"}"\nlisten = "{_HOST}:{listen}"\nadmin_listen = "{_HOST}:{admin}"\n'
            f'metrics_listen = "{_HOST}:0"\nlog = "json"\ntasks = ["{TASK}"]\n'
        )
        security = "insecure = true\n"
        if self.tls:
            mine = self.certificates("server", "coordinator", (_HOST,))
            security = f'[tls]\ncert = "{mine.cert}"\nkey = "{mine.key}"\nclient_ca = "{mine.ca}"\n'
        child = self.processes.start("server", "fl_server", self._write("server", settings + security + extra))
        found = _addresses(child)
        connection = Connection(found["admin_listen"], self.certificates("admin", "bench") if self.tls else None)
        return Server(child, found["listen"], found["metrics_listen"], connection)

    def daemon(self, name: str, server: str, task: str) -> Child:
        """Start a client daemon. task: TOML of the section [task]."""
        security = "insecure = true\n"
        if self.tls:
            mine = self.certificates("client", name)
            security = f'[tls]\nca = "{mine.ca}"\ncert = "{mine.cert}"\nkey = "{mine.key}"\n'
        settings = f'server = "{server}"\nstate_dir = "{self.folder / name}"\nlog = "json"\n'
        if not self.tls:
            settings = f'client_id = "{name}"\n{settings}'
        return self.processes.start(name, "fl_client", self._write(name, f"{settings}{security}[task]\n{task}"))

    def certificates(self, role: str, name: str, hosts: tuple[str, ...] = ()) -> Certificates:
        """A certificate that everybody here trusts, and its files."""
        if self._authority is None:
            raise RuntimeError("expected a place with TLS")
        cert, key = self.folder / f"{role}-{name}.crt", self.folder / f"{role}-{name}.key"
        certificate, private = ca.issue(self._authority, ca.Identity(role, name, hosts), self._validity)
        cert.write_bytes(ca.certificate_pem(certificate))
        key.write_bytes(ca.key_pem(private))
        return Certificates(self.folder / "ca.pem", cert, key)

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return path


@dataclass(frozen=True)
class Server:
    """A coordinator that serves."""

    child: Child
    address: str
    """For clients."""
    metrics: str
    admin: Connection

    @contextmanager
    def operator(self) -> Iterator[AdminClient]:
        """Its admin service."""
        with AdminClient(self.admin) as admin:
            yield admin


def peak_mb(child: Child) -> float:
    """Peak resident memory so far, as the kernel counts it."""
    return _status_mb(child, "VmHWM")


def resident_mb(child: Child) -> float:
    """Resident memory now."""
    return _status_mb(child, "VmRSS")


def cpu_s(child: Child) -> float:
    """Processor time of the process's life so far."""
    times = psutil.Process(child.process.pid).cpu_times()
    return float(times.user + times.system)


def _status_mb(child: Child, field: str) -> float:
    for line in Path(f"/proc/{child.process.pid}/status").read_text().splitlines():
        if line.startswith(field):
            return round(int(line.split()[1]) / 1024, 1)
    raise SystemExit(f"expected Linux's /proc with {field}")


def _addresses(server: Child) -> dict[str, str]:
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        if server.process.poll() is not None:
            raise SystemExit(f"the coordinator has ended: {server.log.read_text()[-2000:]}")
        for line in server.log.read_text().splitlines():
            if '"serving"' in line and line.endswith("}"):
                found: dict[str, str] = json.loads(line)
                return found
        time.sleep(0.02)
    raise SystemExit(f"the coordinator does not serve; see {server.log}")
