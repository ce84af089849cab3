"""The doctor's network checks: real sockets, real certificates, a real coordinator."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from tests.fl_client.setup.conftest import TASK, Doctor, Site
from tests.processes.closing_port import closing_port
from tests.processes.federation import PRESENT, Coordinator, Daemon
from tests.processes.http_proxy import http_proxy
from tests.processes.process import Workspace, eventually


@pytest.fixture
def closed_address() -> str:
    """An address of this machine with a closed port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def tls_port(site: Site) -> Iterator[Callable[[dict[str, str]], str]]:
    """Starts TLS with a certificate for edge devices to look at, and no coordinator behind it; gives its address."""
    servers = []

    def listen(files: dict[str, str]) -> str:
        server = grpc.server(ThreadPoolExecutor(1))
        pair = (Path(files["key"]).read_bytes(), Path(files["cert"]).read_bytes())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield listen
    for server in servers:
        server.stop(None).wait()


def test_a_good_device_in_plain_text(doctor: Doctor, plain_server: Coordinator) -> None:
    """With a serving coordinator there is no fault, exit code 0, and no file is left."""
    found = doctor(server=plain_server.address)
    assert (found.code, found.healthy, found.faults) == (0, True, [])
    assert "supports protocol 1 to 1, and accepts edge-1" in found.of("coordinator")


def test_a_good_device_with_certificates(doctor: Doctor, tls_server: Coordinator, site: Site) -> None:
    """The same with mTLS: the identity is the certificate's."""
    found = doctor(server=tls_server.address, tls=site.issue("client", "edge-1"))
    assert (found.code, found.faults) == (0, [])
    assert "edge-1, by" in found.of("identity")
    assert "has a certificate signed by" in found.of("tls")
    assert "accepts edge-1" in found.of("coordinator")


def test_a_closed_port(doctor: Doctor, closed_address: str) -> None:
    """The port is named with the remedy. TLS and coordinator are not checked; the device is."""
    found = doctor(server=closed_address)
    assert (found.code, found.faults) == (1, ["FAIL port"])
    assert "the port is closed: is the coordinator running" in found.of("port")
    assert found.of("coordinator") == ""
    assert found.of("task")


def test_an_unknown_host_name(doctor: Doctor) -> None:
    """A host name that no name server knows; `.invalid` never is one."""
    found = doctor(server="coordinator.invalid:7070", insecure_remote=True)
    assert "FAIL name" in found.faults
    assert "expected an address for coordinator.invalid" in found.of("name")


def test_an_http_port(doctor: Doctor, plain_server: Coordinator) -> None:
    """The coordinator's port for Prometheus answers and is not the clients' port."""
    found = doctor(server=plain_server.settings["metrics_listen"])
    assert found.faults == ["FAIL coordinator"]
    assert "the server is not a coordinator" in found.of("coordinator")


def test_an_http_port_in_place_of_tls(doctor: Doctor, plain_server: Coordinator, site: Site) -> None:
    """With [tls] the first bytes of the same port show the difference."""
    found = doctor(server=plain_server.settings["metrics_listen"], tls=site.issue("client", "edge-1"))
    assert found.faults == ["FAIL tls"]
    assert "expected TLS, got something else" in found.of("tls")


def test_the_port_of_the_operators(doctor: Doctor, plain_server: Coordinator) -> None:
    """The admin port uses grpc, and has no clients."""
    found = doctor(server=plain_server.settings["admin_listen"])
    assert found.faults == ["FAIL coordinator"]
    assert "is this the port of the coordinator's `listen`, not its admin port" in found.of("coordinator")


def test_plain_text_to_a_coordinator_with_tls(doctor: Doctor, tls_server: Coordinator) -> None:
    """The doctor explains what grpc reports as a closed socket."""
    found = doctor(server=tls_server.address)
    assert found.faults == ["FAIL coordinator"]
    assert "The server uses TLS | add [tls]" in found.of("coordinator")


def test_tls_to_a_coordinator_in_plain_text(doctor: Doctor, plain_server: Coordinator, site: Site) -> None:
    """The doctor explains the reverse case."""
    found = doctor(server=plain_server.address, tls=site.issue("client", "edge-1"))
    assert found.faults == ["FAIL tls"]
    assert "uses plain text: it is another program's port, or a coordinator without [tls]" in found.of("tls")


def test_another_authoritys_coordinator(doctor: Doctor, tls_server: Coordinator, site: Site, strangers: Site) -> None:
    """Another authority than tls.ca signed the coordinator's certificate: both are named."""
    files = {**site.issue("client", "edge-1"), "ca": str(strangers.folder / "ca.crt")}
    found = doctor(server=tls_server.address, tls=files)
    assert found.faults == ["FAIL tls"]
    assert "got one of CN=Impetus CA" in found.of("tls")
    assert "copy ca.crt of the authority that signed it" in found.of("tls")


def test_a_coordinator_whose_certificate_has_ended(
    doctor: Doctor, tls_port: Callable[[dict[str, str]], str], site: Site
) -> None:
    """Signed by the right authority for the right host, but until ten days ago: with both dates, and who renews it."""
    expired = site.issue("server", "old", ("127.0.0.1",), since=100, days=90)
    found = doctor(server=tls_port(expired), tls=site.issue("client", "edge-1"))
    assert found.faults == ["FAIL tls"]
    assert "expected a certificate of the coordinator that is valid now" in found.of("tls")
    assert "fl ca issue server --host HOST --force" in found.of("tls")
    assert "this device's clock is wrong" in found.of("tls")


def test_a_certificate_for_another_host(doctor: Doctor, tls_port: Callable[[dict[str, str]], str], site: Site) -> None:
    """Valid and trusted, but for a name by which it was not called."""
    other = site.issue("server", "other", ("coordinator.example", "10.0.0.7"))
    found = doctor(server=tls_port(other), tls=site.issue("client", "edge-1"))
    assert found.faults == ["FAIL tls"]
    message = "expected a certificate for 127.0.0.1, got one for coordinator.example, 10.0.0.7"
    assert message in found.of("tls")


def test_a_coordinator_whose_certificate_ends_soon(
    doctor: Doctor, tls_port: Callable[[dict[str, str]], str], site: Site
) -> None:
    """With three days left there is a warning, and the checks continue."""
    ending = site.issue("server", "ending", ("127.0.0.1",), since=87, days=90)
    found = doctor(server=tls_port(ending), tls=site.issue("client", "edge-1"))
    assert "WARN tls" in found.faults
    assert "ends in 2 days" in found.of("tls")


def test_a_device_that_the_coordinator_does_not_know(
    doctor: Doctor, tls_server: Coordinator, site: Site, strangers: Site
) -> None:
    """The device's certificate is of another authority: the coordinator's alert comes behind the handshake."""
    files = {**strangers.issue("client", "edge-1"), "ca": str(site.folder / "ca.crt")}
    found = doctor(server=tls_server.address, tls=files)
    assert found.faults == ["FAIL tls"]
    assert "expected the coordinator to accept this device's certificate, got:" in found.of("tls")
    assert "signed by tls.client_ca of the coordinator" in found.of("tls")


def test_a_connection_that_is_closed_in_the_handshake(doctor: Doctor, site: Site) -> None:
    """It says nothing about certificates, nor about a server in plain text."""
    with closing_port() as address:
        found = doctor(server=address, tls=site.issue("client", "edge-1"))
    assert found.faults == ["FAIL tls"]
    assert "expected a TLS handshake, got a connection that was closed in it" in found.of("tls")
    assert "no certificate was checked: the coordinator is starting or ending, a proxy or port-forward" in found.of(
        "tls"
    )
    assert "plain text" not in found.of("tls")


def test_a_daemon_that_runs_is_not_disturbed(doctor: Doctor, plain_server: Coordinator, tmp_path: Path) -> None:
    """The doctor checks the settings of an attached daemon: it reports the daemon, and the session stays."""
    with Workspace(tmp_path) as workspace:
        daemon = Daemon(workspace, plain_server, "edge-busy", task={"name": TASK}).start()
        eventually(lambda: plain_server.client("edge-busy").state == PRESENT, "the daemon attends")
        found = doctor(server=plain_server.address, client_id="edge-busy", state_dir=daemon.settings["state_dir"],
                     task={"name": TASK})  # fmt: skip
        assert f"is held by process {daemon.pid}: a daemon runs" in found.of("state_dir")
        assert "accepts edge-busy" in found.of("coordinator")
        assert plain_server.client("edge-busy").state == PRESENT
        assert not daemon.events("disconnected")
        assert not plain_server.events("client_fenced", client="edge-busy")


def test_a_device_that_is_banned(doctor: Doctor, plain_server: Coordinator) -> None:
    """The coordinator checks its bans before the protocol, so the doctor reports the operator's reason."""
    with plain_server.admin() as admin:
        admin.clients.ban_client("edge-banned", "its sensor lies")
    found = doctor(server=plain_server.address, client_id="edge-banned")
    assert found.faults == ["FAIL coordinator"]
    assert "banned: its sensor lies" in found.of("coordinator")


def test_a_coordinator_behind_a_proxy(
    doctor: Doctor, plain_server: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor goes through the proxy of the environment and names it; a dead one is a fault of the port."""
    address = f"coordinator.invalid:{plain_server.address.rpartition(':')[2]}"
    with http_proxy(tmp_path) as proxy:
        monkeypatch.setenv("http_proxy", proxy.address)
        found = doctor(server=address, insecure_remote=True)
        assert found.faults == ["WARN identity"]  # of plain text over a network
        assert f"through the proxy http://{proxy.address} of the variable http_proxy" in found.of("port")
        assert f"the proxy http://{proxy.address} of the variable http_proxy" in found.of("proxy")
        assert "FAIL name" in doctor(server=address, insecure_remote=True, proxy="none").faults
    dead = doctor(server=address, insecure_remote=True)
    assert dead.faults == ["WARN identity", "FAIL port"]
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:9")
    assert "WARN proxy" in doctor(server=address, insecure_remote=True).faults
    assert 'proxy = "none"' in dead.of("port")


def test_loopback_goes_through_no_proxy(
    doctor: Doctor, plain_server: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a dead proxy in the environment a device that reaches its coordinator on this machine has no fault."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert doctor(server=plain_server.address).faults == []


def test_one_of_several_coordinators_leads(doctor: Doctor, plain_server: Coordinator, closed_address: str) -> None:
    """The first that answers is checked, whichever it is; the finding names all. Without one the first is named."""
    for first, second in ((plain_server.address, closed_address), (closed_address, plain_server.address)):
        found = doctor(server=first, standbys=[second])
        assert (found.code, found.faults) == (0, [])
        assert f"{plain_server.address} leads, of {first}, {second}" in found.of("addresses")
    found = doctor(server=closed_address, standbys=["127.0.0.1:1"])
    assert (found.code, found.faults) == (1, ["WARN addresses", "FAIL port"])
    assert f"expected an open port at one of {closed_address}, 127.0.0.1:1, got none" in found.of("addresses")
