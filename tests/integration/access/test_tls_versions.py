"""TLS 1.3 on every port and in every program, against peers that are limited to one version of TLS.

The programs are not forked: they have to set the version themselves, before grpc is imported.
"""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self

import pytest

from fl_common.certificates.tls_version import VARIABLE
from fl_ops.admin.settings import Certificates
from tests.processes.certificates import Pki, section, server_section
from tests.processes.enrollment import EnrollingCoordinator
from tests.processes.federation import Daemon, SecureCoordinator
from tests.processes.identity_provider import AUDIENCE, ISSUER, Key, jwks
from tests.processes.process import Process, Workspace, eventually, run_fl

V12, V13 = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3
PORTS = ("listen", "admin_listen", "enroll_listen", "token_listen")


@pytest.fixture(autouse=True)
def no_inherited_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs do not inherit the variable of the tests' own process."""
    monkeypatch.delenv(VARIABLE, raising=False)


class Started(SecureCoordinator):
    """A coordinator that imports grpc itself."""

    forks = False

    def environment(self) -> dict[str, str]:
        return {name: value for name, value in Process.environment(self).items() if name != VARIABLE}


class StartedDaemon(Daemon):
    """A daemon that imports grpc itself."""

    forks = False


class StartedWithAllPorts(EnrollingCoordinator):
    """A coordinator with every port that has TLS."""

    forks = False
    environment = Started.environment

    def __init__(self, module_workspace: Workspace, pki: Pki) -> None:
        keys = module_workspace.folder / "keys.json"
        keys.write_bytes(jwks(Key("k1").public()))
        oidc = {"issuer": ISSUER, "audience": AUDIENCE, "jwks_file": str(keys), "roles": {"fl": "viewer"}}
        super().__init__(module_workspace, pki, {"token_listen": "127.0.0.1:0", "oidc": oidc})


@pytest.fixture(scope="module")
def server(module_workspace: Workspace, pki: Pki) -> SecureCoordinator:
    """A coordinator with the default version."""
    return StartedWithAllPorts(module_workspace, pki).serve()


class OneVersion:
    """A listening port that accepts one version of TLS, and records what the handshakes came to."""

    def __init__(self, files: Certificates, version: ssl.TLSVersion) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(files.cert, files.key)
        self._context.set_alpn_protocols(["h2"])
        self._context.minimum_version = self._context.maximum_version = version
        self.accepted: list[str | None] = []
        self.refused: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        with suppress(OSError):  # the port is closed
            while True:
                connection, _ = self._socket.accept()
                try:
                    connection.settimeout(20)
                    with self._context.wrap_socket(connection, server_side=True) as channel:
                        self.accepted.append(channel.version())
                except OSError as error:
                    self.refused.append(str(error))


def handshake(address: str, files: Certificates, version: ssl.TLSVersion) -> str | None:
    """The version of a handshake as a client with this one version. Raises OSError if there is none."""
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    host, port = address.split(":")
    with (
        closing(socket.create_connection((host, int(port)), timeout=60)) as connection,
        context.wrap_socket(connection, server_hostname=host) as channel,
    ):
        return channel.version()


@pytest.mark.slow
@pytest.mark.parametrize("port", PORTS)
def test_a_downgraded_handshake_is_refused_on_every_port(server: SecureCoordinator, pki: Pki, port: str) -> None:
    """A client with a valid certificate and TLS 1.2 gets no connection; with TLS 1.3 it gets one."""
    own = pki.issue("client", "edge-1")
    with pytest.raises(OSError, match=r"EOF|alert|reset"):
        handshake(str(server.settings[port]), own, V12)
    assert handshake(str(server.settings[port]), own, V13) == "TLSv1.3"


@pytest.mark.slow
def test_a_daemon_connects_to_no_server_with_an_older_version(module_workspace: Workspace, pki: Pki) -> None:
    """The reason in the log names TLS 1.3. Nothing is sent."""
    own = pki.issue("client", "edge-2")
    with OneVersion(pki.issue("server", "old"), V12) as old:
        daemon = StartedDaemon(module_workspace, old, "edge-2", insecure=False, tls=section(own)).start()
        reason = daemon.logged("disconnected")["reason"]
        assert daemon.terminate() == 0
    assert "no TLS 1.3" in reason
    assert old.accepted == []
    assert "NO_SHARED_CIPHER" in old.refused[0]


@pytest.mark.slow
@pytest.mark.parametrize(("allowed", "accepted"), [("", []), ("1.2", ["TLSv1.2"])])
def test_the_command_connects_to_no_server_with_an_older_version(
    module_workspace: Workspace, pki: Pki, monkeypatch: pytest.MonkeyPatch, allowed: str, accepted: list[str]
) -> None:
    """The error names TLS 1.3 and the variable that allows TLS 1.2 by name; with it there is a connection."""
    monkeypatch.setenv("FL_TLS_MIN_VERSION", allowed)
    with OneVersion(pki.issue("server", "older"), V12) as old:
        done = list_runs(module_workspace.folder, old.address, pki.issue("admin", "alice"))
        eventually(lambda: old.accepted or old.refused, "a handshake")
    assert done.returncode == 3
    assert old.accepted[:1] == accepted
    assert ("FL_TLS_MIN_VERSION=1.2 allows the older version" in done.stderr) == (not allowed)


def list_runs(folder: Path, address: str, files: Certificates) -> Any:
    """`fl run list` with certificates."""
    named = ("--ca", str(files.ca), "--cert", str(files.cert), "--key", str(files.key))
    return run_fl("run", "list", "--server", address, *named, folder=folder, forks=False)


@pytest.mark.slow
def test_tls_1_2_is_accepted_by_name(module_workspace: Workspace, pki: Pki) -> None:
    """With tls.min_version = "1.2" a coordinator accepts both versions, and a daemon connects with the older one."""
    own = pki.issue("client", "edge-3")
    tls = {**server_section(pki.issue("server", "older")), "min_version": "1.2"}
    server = Started(module_workspace, pki, {"state_dir": "older-state", "tls": tls}, "older").serve()
    assert [handshake(server.address, own, version) for version in (V12, V13)] == ["TLSv1.2", "TLSv1.3"]
    with OneVersion(pki.issue("server", "old"), V12) as old:
        tls = {**section(own), "min_version": "1.2"}
        daemon = StartedDaemon(module_workspace, old, "edge-3", insecure=False, tls=tls).start()
        eventually(lambda: old.accepted, "a handshake with TLS 1.2")
        assert daemon.terminate() == 0
    assert set(old.accepted) == {"TLSv1.2"}
