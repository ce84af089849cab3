"""Certificates made by `fl ca`: who may call what, under which name, and every way to get it wrong, in words."""

from __future__ import annotations

import grpc
import pytest

from fl_ops.errors import NotAllowed, OpsError, Unreachable
from fl_ops.settings import Certificates
from tests.integration.harness import PRESENT, Coordinator, Daemon
from tests.integration.processes import Place, command, eventually
from tests.integration.raw_client import RawClient

ONE = {"clients_per_round": 1, "min_clients": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two authorities and what each has issued: ours, and one that nobody here knows."""
    folder = tmp_path_factory.mktemp("mtls")
    for arguments in (
        ("init", "--dir", "pki"),
        ("issue", "server", "--host", "127.0.0.1", "--dir", "pki"),
        ("issue", "client", "edge-1", "--dir", "pki"),
        ("issue", "client", "edge-2", "--dir", "pki"),
        ("issue", "admin", "alice", "--dir", "pki"),
        ("init", "--dir", "foreign"),
        ("issue", "server", "--host", "127.0.0.1", "--dir", "foreign"),
        ("issue", "client", "edge-1", "--dir", "foreign"),
    ):
        made = command("ca", *arguments, folder=folder)
        assert made.returncode == 0, made.stderr
    with Place(folder) as place:
        yield place


@pytest.fixture(scope="module")
def server(place):
    """A coordinator that wants certificates of our authority."""
    files = {"cert": pem(place, "server-coordinator.crt"), "key": pem(place, "server-coordinator.key")}
    tls = {**files, "client_ca": pem(place, "ca.crt")}
    return Secure(place, settings={"insecure": False, "tls": tls}).serve()


class Secure(Coordinator):
    """A coordinator whose operator is alice."""

    def admin(self, certificates=None):
        return super().admin(certificates or issued(self, "admin-alice"))


def pem(place, name, authority="pki"):
    """A file that `fl ca` wrote."""
    return str(place.folder / authority / name)


def issued(process, stem, authority="pki"):
    """The files of one holder."""
    folder = process.folder / authority
    return Certificates(folder / "ca.crt", folder / f"{stem}.crt", folder / f"{stem}.key")


def tls_of(place, stem, authority="pki", ca="pki"):
    """A daemon's [tls] section."""
    return {
        "ca": pem(place, "ca.crt", ca),
        "cert": pem(place, f"{stem}.crt", authority),
        "key": pem(place, f"{stem}.key", authority),
    }


def test_a_run_completes_over_mtls(place, server):
    """Client and admin by their certificates; the name is the certificate's, and history has the admin's."""
    one = Daemon(place, server, "edge-1", insecure=False, tls=tls_of(place, "client-edge-1")).start()
    eventually(lambda: server.client("edge-1").state == PRESENT, "edge-1 attends")
    run = server.create("secure", round=ONE)
    server.completed(run)
    with server.admin() as admin:
        assert ("admin:alice", "run_created") in [(line.actor, line.event) for line in admin.list_history(run, 0)]
    assert one.terminate() == 0


def test_a_clients_certificate_opens_no_admin_port(server):
    """Wrong role: refused with who came and what is needed."""
    with server.admin(issued(server, "client-edge-1")) as admin, pytest.raises(NotAllowed) as refused:
        admin.list_runs()
    assert "client:edge-1 is not allowed to do this; needed: a certificate with the role admin" in str(refused.value)


def raw(server, stem, client_id, authority="pki"):
    """A client by hand with somebody's certificate."""
    files = issued(server, stem, authority)
    ca = issued(server, stem).ca.read_bytes()
    credentials = grpc.ssl_channel_credentials(ca, files.key.read_bytes(), files.cert.read_bytes())
    return RawClient(server.address, client_id, credentials)


def test_an_admins_certificate_trains_nothing(server):
    """Wrong role on the clients' port."""
    with raw(server, "admin-alice", "alice") as client, pytest.raises(grpc.RpcError) as refused:
        client.register()
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "admin:alice is not allowed to do this; needed: a certificate with the role client" in str(refused.value)


def test_a_client_registers_by_its_certificates_name_only(server):
    """edge-2's certificate, edge-1's name: refused with both."""
    with raw(server, "client-edge-2", "edge-1") as client, pytest.raises(grpc.RpcError) as refused:
        client.register()
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert "client:edge-2 is not allowed to do this; needed: a certificate with the name 'edge-1'" in str(refused.value)


def test_a_session_is_of_no_use_to_another_client(server):
    """edge-1's session id in edge-2's hands: refused."""
    with raw(server, "client-edge-1", "edge-1") as owner, raw(server, "client-edge-2", "edge-2") as thief:
        owner.register()
        thief.session_id = owner.session_id
        with pytest.raises(grpc.RpcError, match="needed: a certificate with the name 'edge-1'"):
            thief.attend()


def test_a_daemon_knows_its_certificates_name(place, server):
    """A client_id that is not the certificate's is told before anything is sent."""
    tls = tls_of(place, "client-edge-2")
    wrong = Daemon(place, server, "edge-9", process="misnamed", insecure=False, tls=tls)
    assert wrong.start().wait() == 2
    assert "is the certificate of 'edge-2', got client_id = 'edge-9': remove client_id, or use" in wrong.errors()


@pytest.mark.parametrize(
    ("process", "settings", "text"),
    [
        pytest.param(
            "foreign-certificate",
            lambda place: {"tls": tls_of(place, "client-edge-1", "foreign")},
            "does not know the CA that signed tls.cert|does it speak TLS, and know this device's CA?",
            id="foreign-certificate",
        ),
        pytest.param(
            "foreign-server",
            lambda place: {"tls": tls_of(place, "client-edge-1", ca="foreign")},
            "the coordinator's certificate is not signed by tls.ca, or not for this host name",
            id="foreign-server",
        ),
        pytest.param(
            "plain-text",
            lambda place: {"insecure": True, "tls": None},
            "closes the connection; does it speak TLS|what answers there is not a coordinator, or it speaks TLS only",
            id="plain-text",
        ),
    ],
)
def test_a_daemon_that_cannot_be_trusted_says_why(place, server, process, settings, text):
    """It tries on, for a certificate may be put right, and tells in words what is the matter."""
    chosen = {name: value for name, value in settings(place).items() if value is not None}
    base = {"insecure": False, "tls": tls_of(place, "client-edge-1")} if "insecure" not in chosen else {}
    stranger = Daemon(place, server, "edge-1", process=process, **{**base, **chosen}).start()
    eventually(lambda: told(stranger, text.split("|")), f"{text!r} is told")
    assert stranger.terminate() == 0


def told(daemon, wordings):
    """Where the daemon said one of them; it tries again and again, and on a busy machine grpc may give up first."""
    reasons = [line["reason"] for line in daemon.events("disconnected")]
    return [reason for reason in reasons if any(words in reason for words in wordings)]


def test_the_command_says_that_plain_text_does_not_do(server, place):
    """`fl --insecure` against a port that wants certificates: exit code 3, and what may be the matter."""
    address = str(server.settings["admin_listen"])
    result = command("run", "list", "--insecure", "--server", address, folder=place.folder)
    assert result.returncode == 3
    assert "it may want certificates, or those of another authority" in result.stderr


def test_an_operator_of_another_authority_is_refused(server, place):
    """A foreign authority on the operator's side: in words, and nothing is listed."""
    files = issued(server, "client-edge-1", "foreign")
    with server.admin(files) as admin, pytest.raises(OpsError) as refused:
        admin.list_runs()
    assert isinstance(refused.value, Unreachable)
    assert "do not accept each other's certificates" in str(refused.value)
