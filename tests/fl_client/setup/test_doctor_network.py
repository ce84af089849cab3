"""The doctor on the way to a coordinator: real sockets, real certificates, a real coordinator behind them."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.fl_client.setup.conftest import TASK
from tests.integration.harness import PRESENT, Daemon
from tests.integration.processes import Place, eventually


@pytest.fixture
def nobody():
    """An address of this machine where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def tls_port(site):
    """Starts TLS with a certificate for edge devices to look at, and no coordinator behind it; gives its address."""
    servers = []

    def listen(files):
        server = grpc.server(ThreadPoolExecutor(1))
        pair = (Path(files["key"]).read_bytes(), Path(files["cert"]).read_bytes())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield listen
    for server in servers:
        server.stop(None).wait()


def test_a_good_device_in_plain_text(look, plain_server):
    """All is well with a coordinator that serves: exit code 0, and nothing is left behind."""
    found = look(server=plain_server.address)
    assert (found.code, found.healthy, found.faults) == (0, True, [])
    assert "speaks protocol 1 to 1, and lets edge-1 in" in found.of("coordinator")


def test_a_good_device_with_certificates(look, tls_server, site):
    """The same with mTLS: the identity is the certificate's."""
    found = look(server=tls_server.address, tls=site.issue("client", "edge-1"))
    assert (found.code, found.faults) == (0, [])
    assert "edge-1, by" in found.of("identity")
    assert "has a certificate that" in found.of("tls")
    assert "lets edge-1 in" in found.of("coordinator")


def test_nobody_listens(look, nobody):
    """The port is named, with what to look at; TLS and coordinator behind it are not looked at, the device is."""
    found = look(server=nobody)
    assert (found.code, found.faults) == (1, ["FAIL port"])
    assert "nobody listens there: is the coordinator running" in found.of("port")
    assert found.of("coordinator") == ""
    assert found.of("task")


def test_a_name_that_is_nobodys(look):
    """A host name that no name server knows; `.invalid` never is one."""
    found = look(server="coordinator.invalid:7070", insecure_remote=True)
    assert "FAIL name" in found.faults
    assert "expected an address for coordinator.invalid" in found.of("name")


def test_a_port_that_speaks_http(look, plain_server):
    """The coordinator's port for Prometheus: it answers, and is no coordinator."""
    found = look(server=plain_server.settings["metrics_listen"])
    assert found.faults == ["FAIL coordinator"]
    assert "what answers there is not a coordinator" in found.of("coordinator")


def test_a_port_that_speaks_http_where_tls_was_wanted(look, plain_server, site):
    """With [tls] the same port is told apart by its first bytes."""
    found = look(server=plain_server.settings["metrics_listen"], tls=site.issue("client", "edge-1"))
    assert found.faults == ["FAIL tls"]
    assert "expected TLS, got something else" in found.of("tls")


def test_the_port_of_the_operators(look, plain_server):
    """The admin port speaks grpc, and knows no clients."""
    found = look(server=plain_server.settings["admin_listen"])
    assert found.faults == ["FAIL coordinator"]
    assert "is this the port of the coordinator's `listen`, not of an operator's" in found.of("coordinator")


def test_plain_text_to_a_coordinator_with_tls(look, tls_server):
    """What grpc reports as a closed socket is told as what it is."""
    found = look(server=tls_server.address)
    assert found.faults == ["FAIL coordinator"]
    assert "TLS answers there | add [tls]" in found.of("coordinator")


def test_tls_to_a_coordinator_in_plain_text(look, plain_server, site):
    """The reverse."""
    found = look(server=plain_server.address, tls=site.issue("client", "edge-1"))
    assert found.faults == ["FAIL tls"]
    assert "speaks plain text: another program's port, or a coordinator without [tls]" in found.of("tls")


def test_another_authoritys_coordinator(look, tls_server, site, strangers):
    """tls.ca is not who signed the coordinator's certificate: both are named."""
    files = {**site.issue("client", "edge-1"), "ca": str(strangers.folder / "ca.crt")}
    found = look(server=tls_server.address, tls=files)
    assert found.faults == ["FAIL tls"]
    assert "got one of CN=Impetus CA" in found.of("tls")
    assert "copy ca.crt of the authority that signed it" in found.of("tls")


def test_a_coordinator_whose_certificate_has_ended(look, tls_port, site):
    """Signed by the right authority for the right host, but until ten days ago: with both dates, and who renews it."""
    expired = site.issue("server", "old", ("127.0.0.1",), since=100, days=90)
    found = look(server=tls_port(expired), tls=site.issue("client", "edge-1"))
    assert found.faults == ["FAIL tls"]
    assert "expected a certificate of the coordinator that is valid now" in found.of("tls")
    assert "fl ca issue server --host HOST --force" in found.of("tls")
    assert "is this device's clock wrong?" in found.of("tls")


def test_a_certificate_for_another_host(look, tls_port, site):
    """Valid and trusted, but for a name by which it was not called."""
    other = site.issue("server", "other", ("coordinator.example", "10.0.0.7"))
    found = look(server=tls_port(other), tls=site.issue("client", "edge-1"))
    assert found.faults == ["FAIL tls"]
    said = "expected a certificate for 127.0.0.1, got one for coordinator.example, 10.0.0.7"
    assert said in found.of("tls")


def test_a_coordinator_whose_certificate_ends_soon(look, tls_port, site):
    """Three days are left: a warning, and the look goes on."""
    ending = site.issue("server", "ending", ("127.0.0.1",), since=87, days=90)
    found = look(server=tls_port(ending), tls=site.issue("client", "edge-1"))
    assert "WARN tls" in found.faults
    assert "ends in 2 days" in found.of("tls")


def test_a_device_that_the_coordinator_does_not_know(look, tls_server, site, strangers):
    """The device's certificate is of another authority: the coordinator's alert comes behind the handshake."""
    files = {**strangers.issue("client", "edge-1"), "ca": str(site.folder / "ca.crt")}
    found = look(server=tls_server.address, tls=files)
    assert found.faults == ["FAIL tls"]
    assert "expected the coordinator to take this device's certificate, got:" in found.of("tls")
    assert "signed by tls.client_ca of the coordinator" in found.of("tls")


def test_a_daemon_that_runs_is_not_disturbed(look, plain_server, tmp_path):
    """The doctor looks at the settings of a daemon that is attached: it says so, and the daemon's session stays."""
    with Place(tmp_path) as place:
        daemon = Daemon(place, plain_server, "edge-busy", task={"name": TASK}).start()
        eventually(lambda: plain_server.client("edge-busy").state == PRESENT, "the daemon attends")
        found = look(server=plain_server.address, client_id="edge-busy", state_dir=daemon.settings["state_dir"],
                     task={"name": TASK})  # fmt: skip
        assert f"is held by process {daemon.pid}: a daemon runs" in found.of("state_dir")
        assert "lets edge-busy in" in found.of("coordinator")
        assert plain_server.client("edge-busy").state == PRESENT
        assert not daemon.events("disconnected")
        assert not plain_server.events("client_fenced", client="edge-busy")


def test_a_device_that_is_banned(look, plain_server):
    """The coordinator looks at its list before it looks at the protocol: the operator's reason comes through."""
    with plain_server.admin() as admin:
        admin.ban_client("edge-banned", "its sensor lies")
    found = look(server=plain_server.address, client_id="edge-banned")
    assert found.faults == ["FAIL coordinator"]
    assert "banned: its sensor lies" in found.of("coordinator")
