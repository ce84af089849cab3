"""A coordinator with an authority for devices only: whoever has its key makes no operator and no coordinator."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

import grpc
import pytest

from fl_ops.admin.settings import Certificates
from fl_ops.certificates import ca
from fl_ops.certificates import pki as files
from fl_ops.errors import OpsError
from tests.marks import slow_except
from tests.processes.certificates import Pki, credentials, server_section
from tests.processes.enrollment import EnrollingCoordinator, RawDevice, write_key
from tests.processes.process import Workspace


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnrollingCoordinator]:
    """It has the key of the devices' authority, and not that of the first one."""
    with Workspace(tmp_path_factory.mktemp("limited")) as workspace:
        pki = Pki(workspace.folder / "pki")
        write_key(pki)
        files.init_for_role(pki.folder, "client", 20)
        pair = files.Pair(pki.folder, "ca-client")
        section = {"ca_cert": str(pair.certificate), "ca_key": str(pair.key), "server_ca": str(pki.ca)}
        tls = server_section(pki.issue("server", "coordinator")) | {"client_ca": str(pki.folder / files.CLIENT_BUNDLE)}
        yield EnrollingCoordinator(workspace, pki, {"tls": tls}, **section).serve()


def stolen(server: EnrollingCoordinator, role: str, name: str) -> Certificates:
    """A certificate that a thief makes with the authority's key."""
    pair = files.Pair(server.pki.folder, "ca-client")
    authority = ca.load_authority(pair.certificate.read_bytes(), pair.key.read_bytes())
    identity = ca.Identity(role, name, ("127.0.0.1",) if role == "server" else ())
    certificate, key = ca.issue(authority, identity, ca.Validity(datetime.now(UTC), 7))
    made = files.Pair(server.pki.folder, f"stolen-{role}-{name}")
    made.write(certificate, key, "")
    return Certificates(server.pki.ca, made.certificate, made.key)


def test_a_device_enrolls_and_an_operator_works(server: EnrollingCoordinator) -> None:
    """The device has a certificate of the limited authority, the operator one of the first."""
    device = RawDevice(server)
    device.enroll(server.create_token("edge-1"))
    assert "clients" in device.leaf.issuer.rfc4514_string()
    with grpc.secure_channel(server.address, device.credentials()) as channel:
        grpc.channel_ready_future(channel).result(20)


@pytest.mark.parametrize("role", slow_except(["admin", "operator", "viewer", "enroller", "server"], "admin"))
def test_the_key_of_the_devices_authority_makes_no_operator(server: EnrollingCoordinator, role: str) -> None:
    """TLS refuses the certificate at the operators' port and at the clients'."""
    made = stolen(server, role, "mallory")
    with server.admin(made) as admin, pytest.raises(OpsError, match="refused"):
        admin.access.who_am_i()
    with grpc.secure_channel(server.address, credentials(made)) as channel, pytest.raises(grpc.FutureTimeoutError):
        grpc.channel_ready_future(channel).result(1.5)
    with server.admin() as admin:
        assert admin.access.who_am_i().roles
