"""Certificates on the clients' and the operators' port: the allowed calls, and the message of every refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from fl_ops.admin.settings import Certificates
from fl_ops.errors import NotAllowed, OpsError, Unreachable
from tests.processes.certificates import Pki, credentials, section
from tests.processes.federation import Coordinator, Daemon, SecureCoordinator
from tests.processes.process import Workspace, eventually, run_fl
from tests.processes.raw_client import RawClient

ONE = {"clients_per_round": 1, "min_clients": 1}


@pytest.fixture(scope="module")
def foreign(module_workspace: Workspace) -> Pki:
    """An authority that the coordinator does not know."""
    return Pki(module_workspace.folder / "foreign")


@pytest.fixture(scope="module")
def server(module_workspace: Workspace, pki: Pki) -> SecureCoordinator:
    """A coordinator that requires certificates."""
    return SecureCoordinator(module_workspace, pki).serve()


def test_a_run_completes_over_mtls(module_workspace: Workspace, server: Coordinator, pki: Pki) -> None:
    """Client and admin are named by their certificates, and the history names the admin."""
    daemon = Daemon(
        module_workspace, server, "edge-1", insecure=False, tls=section(pki.issue("client", "edge-1"))
    ).start()
    server.until_present("edge-1")
    run = server.create("secure", round=ONE)
    server.completed(run)
    with server.admin() as admin:
        assert ("admin:alice", "run_created") in [
            (line.actor, line.event) for line in admin.history.list_history(run, 0)
        ]
    assert daemon.terminate() == 0


def test_a_clients_certificate_opens_no_admin_port(server: Coordinator, pki: Pki) -> None:
    """The wrong role is refused with the name of the caller and the role that is needed."""
    with server.admin(pki.issue("client", "edge-1")) as admin, pytest.raises(NotAllowed) as refused:
        admin.runs.list_runs()
    assert "client:edge-1 is not allowed to do this; needed: the role viewer, operator or admin" in str(refused.value)


@pytest.mark.parametrize(
    ("role", "name", "text"),
    [
        ("admin", "alice", "admin:alice is not allowed to do this; needed: the role client"),
        ("client", "edge-2", "client:edge-2 is not allowed to do this; needed: a certificate with the name 'edge-1'"),
    ],
)
def test_a_certificate_of_another_role_or_name_cannot_register(
    server: Coordinator, pki: Pki, role: str, name: str, text: str
) -> None:
    """The message has the caller's name and what is needed."""
    own = credentials(pki.issue(role, name))
    with RawClient(server.address, "edge-1", own) as client, pytest.raises(grpc.RpcError) as refused:
        client.register()
    assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert text in str(refused.value)


def test_a_session_cannot_be_used_by_another_client(server: Coordinator, pki: Pki) -> None:
    """edge-2 has edge-1's session id and is refused."""
    first, second = (credentials(pki.issue("client", name)) for name in ("edge-1", "edge-2"))
    with RawClient(server.address, "edge-1", first) as owner, RawClient(server.address, "edge-2", second) as thief:
        owner.register()
        thief.session_id = owner.session_id
        with pytest.raises(grpc.RpcError, match="needed: a certificate with the name 'edge-1'"):
            thief.attend()


def test_a_daemon_checks_its_id_against_its_certificate(
    module_workspace: Workspace, server: Coordinator, pki: Pki
) -> None:
    """A client_id that is not the certificate's is refused before anything is sent."""
    tls = section(pki.issue("client", "edge-2"))
    wrong = Daemon(module_workspace, server, "edge-9", process="misnamed", insecure=False, tls=tls)
    assert wrong.start().wait() == 2
    assert "is the certificate of 'edge-2', but client_id = 'edge-9': remove client_id, or use" in wrong.errors()


REFUSALS = {
    "foreign certificate": (
        "does not know the CA that signed tls.cert",
        "does it use TLS, and know this device's CA?",
    ),
    "foreign server": ("the coordinator's certificate is not signed by tls.ca",),
    "plain text": (
        "closes the connection; does it use TLS",
        "; or it accepts TLS only",
    ),
}
"""Kind of error -> messages. A daemon logs one of them: on a busy machine grpc may give up before the handshake."""


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_daemon_that_cannot_connect_logs_the_reason(
    module_workspace: Workspace, server: Coordinator, pki: Pki, foreign: Pki, kind: str
) -> None:
    """It continues to retry, because certificates can be replaced."""
    own, other = pki.issue("client", "edge-1"), foreign.issue("client", "edge-1")
    settings: dict[str, dict[str, Any]] = {
        "foreign certificate": {"insecure": False, "tls": section(replace(other, ca=own.ca))},
        "foreign server": {"insecure": False, "tls": section(replace(own, ca=other.ca))},
        "plain text": {"insecure": True},
    }
    daemon = Daemon(module_workspace, server, "edge-1", process=kind.replace(" ", "-"), **settings[kind]).start()

    def logged() -> bool:
        reasons = [line["reason"] for line in daemon.events("disconnected")]
        return any(text in reason for reason in reasons for text in REFUSALS[kind])

    eventually(logged, f"{kind} is logged")
    assert daemon.terminate() == 0


DATES = {"expired": (-10, 7, "ended on 20"), "early": (5, 7, "is not valid before 20")}
"""Kind of certificate -> its first day from now, its days, and what the daemon logs."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", DATES)
def test_a_daemon_with_an_invalid_certificate_names_the_date(
    module_workspace: Workspace, server: Coordinator, pki: Pki, kind: str
) -> None:
    """It stays alive, logs the date and the remedy, and connects without a restart when it has a valid certificate."""
    begins, days, text = DATES[kind]
    name = f"edge-{kind}"
    own = pki.issue("client", name, days, begins)
    daemon = Daemon(module_workspace, server, name, insecure=False, tls=section(own)).start()
    line = daemon.logged("certificate_invalid")
    assert f"this device's certificate {own.cert} {text}" in line["reason"]
    assert line["todo"]
    pki.issue("client", name)
    server.until_present(name)
    assert daemon.terminate() == 0


def test_the_command_explains_a_refused_plain_text_connection(server: Coordinator, module_workspace: Workspace) -> None:
    """`fl --insecure` to a port that requires certificates: exit code 3 and the probable reason."""
    address = str(server.settings["admin_listen"])
    result = run_fl("run", "list", "--insecure", "--server", address, folder=module_workspace.folder)
    assert result.returncode == 3
    assert "a coordinator with TLS needs your certificates" in result.stderr


def test_an_operator_of_another_authority_is_refused(server: Coordinator, foreign: Pki) -> None:
    """Nothing is listed. The operator trusts the coordinator in the second case, and learns that it refused."""
    theirs = foreign.issue("admin", "eve")
    ours = Certificates(Path(server.settings["tls"]["client_ca"]), theirs.cert, theirs.key)
    for files, reason in ((theirs, "is not signed by the authority in --ca"), (ours, "refused the certificate")):
        with server.admin(files) as admin, pytest.raises(OpsError) as refused:
            admin.runs.list_runs()
        assert isinstance(refused.value, Unreachable)
        assert reason in str(refused.value)
