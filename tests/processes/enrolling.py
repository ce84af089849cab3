"""A coordinator that signs certificates of devices, and daemons that got theirs for tokens and renew them."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives import hashes
from prometheus_client.parser import text_string_to_metric_families

from fl_client.__main__ import main
from fl_ops.certificates import ca
from protos.fl.v1 import admin_pb2, admin_pb2_grpc
from tests.processes.certificates import Pki, credentials
from tests.processes.federation import Daemon, SecureCoordinator
from tests.processes.process import TIMEOUT_S, Workspace


class EnrollingCoordinator(SecureCoordinator):
    """A coordinator with `enroll_listen` and the authority's key."""

    def __init__(self, workspace: Workspace, pki: Pki, settings: Mapping[str, Any] | None = None, **enrollment: Any):
        """enrollment: keys of the section [enrollment]."""
        self.pki = pki
        key = pki.folder / "ca.key"
        key.touch(0o600)
        key.write_bytes(ca.key_pem(pki.authority.key))
        section = {"ca_cert": str(pki.ca), "ca_key": str(key), **enrollment}
        super().__init__(workspace, pki, {"enroll_listen": "127.0.0.1:0", "enrollment": section, **(settings or {})})

    @property
    def enroll_address(self) -> str:
        """host:port for devices without a certificate."""
        return str(self.settings["enroll_listen"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the authority."""
        return self.pki.authority.certificate.fingerprint(hashes.SHA256()).hex()

    def tokens(self, *specs: admin_pb2.EnrollmentSpec, ttl_s: float = 0.0) -> list[str]:
        """New tokens. ttl_s: their validity; 0: the coordinator's default."""
        request = admin_pb2.CreateEnrollmentsRequest(specs=specs, ttl_s=ttl_s)
        with grpc.secure_channel(str(self.settings["admin_listen"]), credentials(self._alice)) as channel:
            answer = admin_pb2_grpc.AdminStub(channel).CreateEnrollments(request, timeout=TIMEOUT_S)
        return [each.token for each in answer.created]

    def token(self, name: str) -> str:
        """A token with one use."""
        return self.tokens(admin_pb2.EnrollmentSpec(name=name, uses=1))[0]

    def enroll(self, name: str, token: str, state_dir: Path, *more: str) -> int:
        """Run `fl-client init` for a certificate alone; gives the exit code."""
        return self.init(token, "--only-certificate", "--client-id", name, "--state-dir", str(state_dir), *more)

    def init(self, token: str, *more: str) -> int:
        """Run `fl-client init` with these flags; gives the exit code."""
        where = ["--server", self.address, "--enroll-server", self.enroll_address]
        return main(["init", *where, "--ca-fingerprint", self.fingerprint, "--token", token, *more])


def enrolled_daemon(server: EnrollingCoordinator, workspace: Workspace, name: str, **settings: Any) -> Daemon:
    """A daemon with a certificate that it renews. It is not started."""
    state_dir = workspace.folder / f"{name}-state"
    assert server.enroll(name, server.token(name), state_dir) == 0
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
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    return {
        tuple(each.labels.values()): each.value for family in families for each in family.samples if each.name == name
    }
