"""A coordinator and daemons as processes in a folder, with production settings, and their memory and processor time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil

from benchmarks.processes import Child, Processes
from fl_ops.admin.client import AdminClient
from fl_ops.admin.settings import Certificates, Connection
from fl_ops.certificates import ca

TIMEOUT_S = 600.0
_HOST = "127.0.0.1"
TASK = "benchmarks.constant_task:ConstantTask"
"""The task of the benchmarks, which the coordinator is allowed to load."""


class Deployment:
    """A coordinator and daemons in a folder, in plain text or with mTLS and its own authority."""

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
        """Whether every connection needs a certificate."""
        return self._authority is not None

    def enrollment(self) -> tuple[str, str]:
        """TOML for a coordinator that enrolls devices: `first` and `extra` of `serve`. Writes the authority's key."""
        if self._authority is None:
            raise RuntimeError("expected a deployment with TLS")
        key = self.folder / "ca.key"
        key.touch(0o600)
        key.write_bytes(ca.key_pem(self._authority.key))
        section = f'[enrollment]\nca_cert = "{self.folder / "ca.pem"}"\nca_key = "{key}"\n'
        return f'enroll_listen = "{_HOST}:0"\n', section

    def serve(self, ports: tuple[int, int] = (0, 0), extra: str = "", first: str = "") -> Server:
        """Start the coordinator.

        ports: for clients and for admins; 0 is a free port. extra: more sections in TOML. first: more keys.
        """
        listen, admin = ports
        settings = (
            f'state_dir = "{self.folder / "state"}"\nlisten = "{_HOST}:{listen}"\nadmin_listen = "{_HOST}:{admin}"\n'
            f'metrics_listen = "{_HOST}:0"\nlog = "json"\ntasks = ["{TASK}"]\n'
        )
        security = "insecure = true\n"
        if self.tls:
            files = self.certificates("server", "coordinator", (_HOST,))
            security = f'[tls]\ncert = "{files.cert}"\nkey = "{files.key}"\nclient_ca = "{files.ca}"\n'
        child = self.processes.start("server", "fl_server", self._write("server", first + settings + security + extra))
        addresses = _addresses(child)
        connection = Connection(addresses["admin_listen"], self.certificates("admin", "bench") if self.tls else None)
        enrollment = addresses.get("enroll_listen", "")
        return Server(child, addresses["listen"], addresses["metrics_listen"], connection, enrollment)

    def daemon(self, name: str, server: str, task: str) -> Child:
        """Start a client daemon. task: TOML of the section [task]."""
        security = "insecure = true\n"
        if self.tls:
            files = self.certificates("client", name)
            security = f'[tls]\nca = "{files.ca}"\ncert = "{files.cert}"\nkey = "{files.key}"\n'
        settings = f'server = "{server}"\nstate_dir = "{self.folder / name}"\nlog = "json"\ndevice = "cpu"\n'
        if not self.tls:
            settings = f'client_id = "{name}"\n{settings}'
        return self.processes.start(name, "fl_client", self._write(name, f"{settings}{security}[task]\n{task}"))

    def certificates(self, role: str, name: str, hosts: tuple[str, ...] = ()) -> Certificates:
        """Issue a certificate of the deployment's authority. Returns its files."""
        if self._authority is None:
            raise RuntimeError("expected a deployment with TLS")
        cert, key = self.folder / f"{role}-{name}.crt", self.folder / f"{role}-{name}.key"
        certificate, private = ca.issue(self._authority, ca.Identity(role, name, hosts), self._validity)
        cert.write_bytes(ca.certificate_pem(certificate))
        key.touch(0o600)
        key.write_bytes(ca.key_pem(private))
        return Certificates(self.folder / "ca.pem", cert, key)

    def _write(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.toml"
        path.write_text(text)
        return path


@dataclass(frozen=True)
class Server:
    """A running coordinator. address: for clients."""

    child: Child
    address: str
    metrics: str
    admin: Connection
    enrollment: str = ""
    """host:port for devices without a certificate."""

    @contextmanager
    def operator(self) -> Iterator[AdminClient]:
        """A client of its admin port."""
        with AdminClient(self.admin) as admin:
            yield admin


def peak_mb(child: Child) -> float:
    """Peak resident memory so far, from the kernel."""
    return _status_mb(child, "VmHWM")


def forget_peak(child: Child) -> None:
    """Count the peak from now on."""
    Path(f"/proc/{child.process.pid}/clear_refs").write_text("5")


def resident_mb(child: Child) -> float:
    """Resident memory now."""
    return _status_mb(child, "VmRSS")


def cpu_s(child: Child) -> float:
    """Processor time since the start of the process."""
    times = psutil.Process(child.process.pid).cpu_times()
    return float(times.user + times.system)


def _status_mb(child: Child, field: str) -> float:
    for line in Path(f"/proc/{child.process.pid}/status").read_text().splitlines():
        if line.startswith(field):
            return round(int(line.split()[1]) / 1024, 1)
    raise SystemExit(f"expected Linux's /proc with {field}")


def _addresses(server: Child) -> dict[str, str]:
    ends = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends:
        if server.process.poll() is not None:
            raise SystemExit(f"the coordinator has ended: {server.log.read_text()[-2000:]}")
        for line in server.log.read_text().splitlines():
            if '"serving"' in line and line.endswith("}"):
                addresses: dict[str, str] = json.loads(line)
                return addresses
        time.sleep(0.02)
    raise SystemExit(f"the coordinator did not serve in time; see {server.log}")
