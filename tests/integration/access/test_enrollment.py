"""Enrollment with a real coordinator: tokens, renewals and revocations over the wire, and every attack on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2, coordinator_pb2_grpc, enrollment_pb2_grpc
from protos.fl.v1 import coordinator_pb2 as coordinator_pb
from protos.fl.v1 import enrollment_pb2 as pb
from tests.processes.certificates import Pki, credentials, section
from tests.processes.enrollment import EnrollingCoordinator, RawDevice, csr_of, error_of, new_key
from tests.processes.federation import Daemon
from tests.processes.openssl_authority import OpensslAuthority
from tests.processes.process import TIMEOUT_S, Workspace, eventually
from tests.processes.raw_client import RawClient
from tests.processes.token_attacks import ATTACKS, Attack

DENIED, LIMITED = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture(scope="module")
def foreign(module_workspace: Workspace) -> OpensslAuthority:
    """An authority of the site, which also signs for clients; its key is not on the coordinator."""
    return OpensslAuthority(module_workspace.folder / "foreign")


@pytest.fixture(scope="module")
def server(module_workspace: Workspace, foreign: OpensslAuthority) -> EnrollingCoordinator:
    """A coordinator that trusts its own authority and another one."""
    pki = Pki(module_workspace.folder / "pki")
    settings = {"limits": {"reattach_grace_s": 1.0}}
    server = EnrollingCoordinator(module_workspace, pki, settings, address_failures_per_min=1e6)
    both = module_workspace.folder / "both.crt"
    both.write_bytes(pki.ca.read_bytes() + foreign.ca.read_bytes())
    server.settings["tls"]["client_ca"] = str(both)
    server.configure()
    return server.serve()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_an_attack_on_a_token_is_refused(server: EnrollingCoordinator, attack: Attack) -> None:
    """With the reason, a row in the audit log, and no certificate."""
    call = attack(server)
    with server.admin() as admin:
        before = len(admin.access.list_certificates())
        error: Any = error_of(call)
        assert (error.code(), ATTACKS[attack] in error.details()) == (DENIED, True), error.details()
        assert len(admin.access.list_certificates()) == before


def test_the_ports_serve_only_their_own_callers(server: EnrollingCoordinator) -> None:
    """No work without a certificate at `enroll_listen`, and no enrollment at `listen`."""
    with server.enrolling() as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorStub(channel)
        error: Any = error_of(lambda: stub.Register(coordinator_pb.RegisterRequest(client_id="x"), timeout=TIMEOUT_S))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        renewals: Any = enrollment_pb2_grpc.CertificatesStub(channel)
        error = error_of(lambda: renewals.Renew(pb.RenewRequest(csr=csr_of(new_key())), timeout=TIMEOUT_S))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    with grpc.secure_channel(server.address, server.enrolled("edge-b1").credentials()) as channel:
        enrollments: Any = enrollment_pb2_grpc.EnrollmentStub(channel)
        error = error_of(lambda: enrollments.Enroll(pb.EnrollRequest(token="x"), timeout=TIMEOUT_S))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


def test_an_operator_cannot_renew_as_a_client(server: EnrollingCoordinator) -> None:
    """A certificate of another role is refused before its request is read."""
    with grpc.secure_channel(server.address, credentials(server.pki.issue("admin", "alice"))) as channel:
        stub: Any = enrollment_pb2_grpc.CertificatesStub(channel)
        error: Any = error_of(lambda: stub.Renew(pb.RenewRequest(csr=csr_of(new_key())), timeout=TIMEOUT_S))
        assert error.code() is DENIED


def test_an_enrolled_device_renews_its_certificate(server: EnrollingCoordinator) -> None:
    """With a new key; both certificates are listed, the newest first."""
    device = server.enrolled("edge-b2")
    key = new_key()
    renewed = device.renew(csr_of(key))
    assert renewed.name == "edge-b2"
    with RawClient(server.address, "edge-b2", replace(device, key=key, issued=renewed).credentials()) as client:
        client.register()
    with server.admin() as admin:
        serials = [each.serial for each in admin.access.list_certificates("edge-b2")]
    new, old = x509.load_pem_x509_certificate(renewed.chain), device.leaf
    assert serials == [f"{new.serial_number:x}", f"{old.serial_number:x}"]


def revocation_of(device: RawDevice, kind: str) -> dict[str, str]:
    """The arguments of a revocation of the device's first certificate."""
    with device.server.admin() as admin:
        status = admin.access.list_certificates(device.issued.name)[-1]
    return {kind: {"name": status.name, "serial": status.serial, "key": status.key}[kind]}


@pytest.mark.parametrize("kind", ["name", "serial", "key"])
def test_a_revocation_ends_open_streams_and_all_further_calls(server: EnrollingCoordinator, kind: str) -> None:
    """On the open connection too, and the certificate cannot be renewed."""
    name = f"edge-c-{kind}"
    device = server.enrolled(name)
    with (
        RawClient(server.address, name, device.credentials()) as client,
        grpc.secure_channel(server.address, device.credentials()) as channel,
    ):
        client.register()
        stream = client.attend()
        device.renew(channel=channel)
        with server.admin() as admin:
            shown = admin.access.revoke_certificates("stolen", **revocation_of(device, kind))
            assert {(each.name, each.HasField("revoked")) for each in shown} == {(name, True)}
            assert all(each.reason.startswith("stolen") for each in shown)
        ended: Any = error_of(lambda: list(stream))
        assert ended.code() is DENIED
        for call in (client.register, lambda: device.renew(channel=channel), device.renew):
            error: Any = error_of(call)
            assert (error.code(), "stolen" in error.details()) == (DENIED, True), error.details()


def test_a_serial_number_denies_what_was_renewed_from_it(server: EnrollingCoordinator) -> None:
    """A thief who renewed in time loses the renewed certificates too; the one of before keeps working."""
    device = server.enrolled("edge-c1")
    stolen = replace(device, issued=device.renew())
    renewed = replace(stolen, issued=stolen.renew())
    with server.admin() as admin:
        shown = admin.access.revoke_certificates("copied", serial=f"{stolen.leaf.serial_number:x}")
    assert {each.serial for each in shown} == {f"{each.leaf.serial_number:x}" for each in (stolen, renewed)}
    assert error_of(stolen.renew).code() is DENIED
    assert error_of(renewed.renew).code() is DENIED
    assert device.renew().name == "edge-c1"


def test_a_bootstrap_token_gives_nothing_that_others_have(
    server: EnrollingCoordinator, foreign: OpensslAuthority
) -> None:
    """Neither the name of a revoked device, nor that of a device with a certificate of another authority."""
    token, one = server.create_token(name_prefix="pod-", uses=9), RawDevice(server)
    one.enroll(token, name="pod-1")
    with server.admin() as admin:
        admin.access.revoke_certificates("stolen", name="pod-1")
    error: Any = error_of(lambda: RawDevice(server).enroll(token, name="pod-1"))
    assert "needed: a token made after the revocation of this name's certificate" in error.details()
    two = RawDevice(server)
    two.enroll(token, name="pod-2")
    with server.admin() as admin:
        admin.access.revoke_certificates("replaced", serial=f"{two.leaf.serial_number:x}")
    files = foreign.issue("pod-2")
    own = grpc.ssl_channel_credentials(server.pki.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes())
    with RawClient(server.address, "pod-2", own) as client:
        client.register()
    later = server.create_token(name_prefix="pod-", uses=9)
    error = error_of(lambda: RawDevice(server).enroll(later, name="pod-2"))
    assert "a client 'pod-2' has registered without enrollment" in error.details()


def test_labels_of_the_token_win(server: EnrollingCoordinator, foreign: OpensslAuthority) -> None:
    """Over what the device says, also after its renewal and a restart; runs choose by them, and claims are marked."""
    device = RawDevice(server)
    device.enroll(server.create_token("site-1", labels={"site": "north"}))
    claimed = {"site": "south", "gpu": "a100"}
    with RawClient(server.address, "site-1", device.credentials()) as client:
        client.register(labels=claimed)
    found = server.client("site-1")
    assert (dict(found.labels), list(found.enrolled_labels)) == ({"site": "north", "gpu": "a100"}, ["site"])
    assert server.logged("labels_overruled")["claimed"] == {"site": "south"}
    server.kill()
    server.serve()
    assert list(server.client("site-1").enrolled_labels) == ["site"]
    key = new_key()
    renewed = replace(device, key=key, issued=device.renew(csr_of(key)))
    with RawClient(server.address, "site-1", renewed.credentials()) as client:
        client.register(labels=claimed)
        client.attend()
        with server.admin() as admin:
            south = {client.client_id for client in admin.clients.list_clients(labels={"site": "south"})}
        assert "site-1" not in south
    files = foreign.issue("site-2")
    own = grpc.ssl_channel_credentials(server.pki.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes())
    with RawClient(server.address, "site-2", own) as client:
        client.register(labels=claimed)
    found = server.client("site-2")
    assert (dict(found.labels), list(found.enrolled_labels)) == (claimed, [])


@pytest.mark.parametrize("kind", ["name", "serial"])
def test_a_certificate_of_another_authority_is_revoked(
    server: EnrollingCoordinator, foreign: OpensslAuthority, kind: str
) -> None:
    """The coordinator did not issue it and does not know it; it is listed afterwards if it was named by its serial."""
    name = f"edge-d-{kind}"
    files = foreign.issue(name)
    leaf = x509.load_pem_x509_certificate(files.cert.read_bytes())
    own = grpc.ssl_channel_credentials(server.pki.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes())
    with RawClient(server.address, name, own) as client:
        client.register()
        stream = client.attend()
        given = {"name": name} if kind == "name" else {"serial": f"{leaf.serial_number:X}"}
        with server.admin() as admin:
            admin.access.revoke_certificates("stolen", **given)
            listed = [each.serial for each in admin.access.list_certificates()]
        assert (f"{leaf.serial_number:x}" in listed) == (kind == "serial")
        assert error_of(lambda: list(stream)).code() is DENIED
        assert error_of(client.register).code() is DENIED


def test_a_device_comes_back_after_a_revocation_with_a_new_token_and_key(server: EnrollingCoordinator) -> None:
    """Its old key gets nothing more, whoever has a token."""
    device = server.enrolled("edge-c2")
    with server.admin() as admin:
        admin.access.revoke_certificates("lost", name="edge-c2")
    token = server.create_token("edge-c2")
    error: Any = error_of(lambda: device.enroll(token))
    assert "a new key: this one is revoked" in error.details()
    again = RawDevice(server)
    again.enroll(token)
    eventually(lambda: registered(again, "edge-c2"), "it registers")  # its certificate begins in the next second


def registered(device: RawDevice, name: str) -> bool:
    """Whether the device can register now."""
    with RawClient(device.server.address, name, device.credentials()) as client:
        try:
            return bool(client.register().session_id)
        except grpc.RpcError:
            return False


def test_an_enrolled_daemon_works_until_it_is_revoked(
    module_workspace: Workspace, server: EnrollingCoordinator
) -> None:
    """A run completes with it; afterwards it is not waited for."""
    device = server.enrolled("edge-e1")
    folder = Pki(module_workspace.folder / "edge-e1-tls")
    files = folder.issue("client", "edge-e1")
    files.key.write_bytes(device.key_pem)
    files.cert.write_bytes(device.issued.chain)
    files.ca.write_bytes(device.issued.authority)
    daemon = Daemon(module_workspace, server, "edge-e1", insecure=False, tls=section(files)).start()
    server.until_present("edge-e1")
    one = {"clients_per_round": 1, "min_clients": 1}
    server.completed(server.create("enrolled", round=one))
    with server.admin() as admin:
        admin.access.revoke_certificates("stolen", name="edge-e1")
    eventually(lambda: server.client("edge-e1").state == admin_pb2.CLIENT_STATE_LOST, "it is not waited for")
    assert "certificates_revoked" in server.history("edge-e1")
    daemon.kill()


def test_tokens_are_nowhere_but_in_their_response(module_workspace: Workspace, server: EnrollingCoordinator) -> None:
    """Neither in the coordinator's output, nor in its files, history or audit log."""
    tokens = [server.create_token("edge-f1"), server.create_token("edge-f1")]
    RawDevice(server).enroll(tokens[0])
    error_of(lambda: RawDevice(server).enroll(tokens[0]))
    error_of(lambda: RawDevice(server).enroll(f"{tokens[1]}x"))
    secrets = [token.partition(".")[2].encode() for token in tokens]
    files = [path for path in Path(server.settings["state_dir"]).rglob("*") if path.is_file()]
    output = [server.folder / f"{server.name}.log", server.folder / f"{server.name}.err"]
    texts = [path.read_bytes() for path in (*files, *(each for each in output if each.exists()))]
    with server.admin() as admin:
        texts.append(str(admin.history.list_history("", 0)).encode() + str(admin.access.list_enrollments()).encode())
    assert len(texts) >= 3
    assert not any(secret in text for secret in secrets for text in texts)


def test_calls_that_cannot_be_carried_out(server: EnrollingCoordinator) -> None:
    """The message has the expected value."""
    with server.admin() as admin:
        with pytest.raises(OpsError, match="exactly one of name, serial and key, got none"):
            admin.access.revoke_certificates("x")
        with pytest.raises(OpsError, match="exactly one of name, serial and key, got name and key"):
            admin.access.revoke_certificates("x", name="a", key="b")
        with pytest.raises(OpsError, match="no enrollment token"):
            admin.call(admin_pb2.RevokeEnrollmentRequest(id="0000", reason="x"), admin_pb2.RevokeEnrollmentResponse)
