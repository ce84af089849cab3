"""Certificates of a foreign authority, and expired ones of everybody: nothing but the connection is lost."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from fl_ops.admin.client import AdminClient
from fl_ops.admin.settings import Certificates, Connection
from fl_ops.certificates import ca
from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2, admin_pb2_grpc
from tests.processes.certificates import Pki, credentials, section, server_section
from tests.processes.federation import Daemon, SecureCoordinator
from tests.processes.process import TIMEOUT_S, Workspace
from tests.processes.raw_client import RawClient


def ended(pki: Pki, role: str, name: str) -> Certificates:
    """A certificate that expired two days ago."""
    return pki.issue(role, name, days=2, begins=-4)


@pytest.fixture(scope="module")
def foreign(module_workspace: Workspace) -> Pki:
    """Another authority with the same name."""
    return Pki(module_workspace.folder / "foreign")


@pytest.fixture(scope="module")
def server(module_workspace: Workspace, pki: Pki) -> SecureCoordinator:
    """A coordinator with valid certificates."""
    return SecureCoordinator(module_workspace, pki).serve()


def expired(authority: Pki, path: Path) -> Path:
    """The authority's certificate with the same name and key, which expired yesterday."""
    now, old = datetime.now(UTC), authority.authority
    made = (
        x509.CertificateBuilder()
        .subject_name(old.certificate.subject)
        .issuer_name(old.certificate.subject)
        .public_key(old.key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=9))
        .not_valid_after(now - timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(old.key, hashes.SHA256())
    )
    path.write_bytes(ca.certificate_pem(made))
    return path


def registers(server: SecureCoordinator, files: Certificates) -> grpc.StatusCode | None:
    """The status of a registration as edge-1; None if it is accepted."""
    with RawClient(server.address, "edge-1", credentials(files)) as client:
        try:
            client.register()
        except grpc.RpcError as error:
            return error.code()
    return None


def lists(server: SecureCoordinator, files: Certificates) -> grpc.StatusCode | None:
    """The status of an operator's call; None if it is accepted. Not by `fl`, which checks its own files first."""
    with grpc.secure_channel(str(server.settings["admin_listen"]), credentials(files)) as channel:
        try:
            admin_pb2_grpc.AdminStub(channel).ListRuns(admin_pb2.ListRunsRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code()
    return None


def test_the_federations_own_certificates_are_accepted(server: SecureCoordinator, pki: Pki) -> None:
    """The checks below can fail."""
    assert registers(server, pki.issue("client", "edge-1")) is None
    assert lists(server, pki.issue("admin", "alice")) is None


def test_a_foreign_authority_opens_no_port(server: SecureCoordinator, pki: Pki, foreign: Pki) -> None:
    """Its certificates have the right names and roles, and the holder trusts the coordinator."""
    assert registers(server, replace(foreign.issue("client", "edge-1"), ca=pki.ca)) is grpc.StatusCode.UNAVAILABLE
    assert lists(server, replace(foreign.issue("admin", "alice"), ca=pki.ca)) is grpc.StatusCode.UNAVAILABLE


def test_expired_certificates_open_no_port(server: SecureCoordinator, pki: Pki) -> None:
    """Of a client, and of an operator."""
    assert registers(server, ended(pki, "client", "edge-1")) is grpc.StatusCode.UNAVAILABLE
    assert lists(server, ended(pki, "admin", "alice")) is grpc.StatusCode.UNAVAILABLE
    pki.issue("admin", "alice")


def explained(address: str, files: Certificates) -> str:
    """The error of `fl run list`."""
    with AdminClient(Connection(address, files)) as admin, pytest.raises(OpsError) as failed:
        admin.runs.list_runs()
    return str(failed.value)


def test_nobody_uses_a_coordinator_with_an_expired_certificate(module_workspace: Workspace) -> None:
    """Daemon and operator name the reason and send nothing; the coordinator runs and warns."""
    pki = Pki(module_workspace.folder / "pki-of-server")
    tls = server_section(ended(pki, "server", "ended"))
    server = SecureCoordinator(module_workspace, pki, {"tls": tls, "state_dir": "ended-state"}, "ended").serve()
    daemon = Daemon(
        module_workspace, server, "edge-2", insecure=False, tls=section(pki.issue("client", "edge-2"))
    ).start()
    server.logged("certificate_ends_soon")
    assert (
        "the coordinator's certificate, or that of its authority, has ended" in daemon.logged("disconnected")["reason"]
    )
    assert daemon.terminate() == 0
    error = explained(str(server.settings["admin_listen"]), pki.issue("admin", "alice"))
    assert "or that of its authority, has expired" in error
    assert server.events("client_registered") == []


def test_nobody_uses_an_expired_authority(module_workspace: Workspace) -> None:
    """Valid certificates of an authority that has expired: neither side trusts the other."""
    pki = Pki(module_workspace.folder / "pki-of-authority")
    old = expired(pki, module_workspace.folder / "expired.crt")
    tls = {**server_section(pki.issue("server", "coordinator")), "client_ca": str(old)}
    server = SecureCoordinator(module_workspace, pki, {"tls": tls, "state_dir": "old-state"}, "old").serve()
    own = pki.issue("client", "edge-1")
    assert registers(server, own) is grpc.StatusCode.UNAVAILABLE
    trusting = replace(own, ca=old)
    daemon = Daemon(module_workspace, server, "edge-1", insecure=False, tls=section(trusting)).start()
    assert "or that of its authority, has ended" in daemon.logged("disconnected")["reason"]
    assert daemon.terminate() == 0
    assert server.events("client_registered") == []
