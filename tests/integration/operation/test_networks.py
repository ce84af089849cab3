"""Networks of sites, with real processes: TLS that is opened, SNI, silence, IPv6, an address that changes, clocks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from fl_client.settings.config import ClientConfig
from fl_client.setup.doctor import idle, network
from fl_client.setup.doctor.findings import Level
from tests.processes.certificates import Pki
from tests.processes.federation import TASK, Coordinator, Daemon
from tests.processes.process import Workspace, eventually
from tests.processes.reverse_proxy import free_port, passthrough
from tests.processes.silent_relay import silent_relay
from tests.processes.tls_inspector import tls_inspector

NAME = "coordinator.example.org"


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """The authority of the site."""
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, pki: Pki) -> Iterator[Coordinator]:
    """A coordinator with mTLS."""
    own = pki.issue("server", "coordinator", hosts=("127.0.0.1", NAME))
    tls = {"cert": str(own.cert), "key": str(own.key), "client_ca": str(own.ca)}
    with Workspace(tmp_path_factory.mktemp("secure")) as workspace:
        yield Coordinator(workspace, settings={"tls": tls, "insecure": False}).serve()


def tls_of(pki: Pki, name: str) -> dict[str, str]:
    """A device's section [tls]."""
    own = pki.issue("client", name)
    return {"ca": str(own.ca), "cert": str(own.cert), "key": str(own.key)}


def config_of(address: str, **changes: Any) -> ClientConfig:
    """A device's settings."""
    own = {} if "tls" in changes else {"client_id": "edge-1", "insecure": True}
    return ClientConfig.model_validate(
        {"server": address, "state_dir": "state", "task": {"name": TASK}, **own, **changes}
    )


class At:
    """A coordinator at another address."""

    def __init__(self, address: str) -> None:
        self.address = address


def test_a_proxy_that_opens_tls_is_named(secure: Coordinator, workspace: Workspace, pki: Pki, tmp_path: Path) -> None:
    """Doctor and daemon say who issued the certificate, and what the proxy's operator has to do."""
    shown = Pki(tmp_path / "inspection", "Inspection CA").forge(
        "inspected", [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    )
    tls = tls_of(pki, "inspected")
    with tls_inspector(secure.address, shown.cert, shown.key) as address:
        [found] = network.check_tls(config_of(address, tls=tls))
        daemon = Daemon(workspace, At(address), "inspected", tls=tls, insecure=False).start()
        reason = daemon.logged("disconnected")["reason"]
    assert found.level is Level.FAIL
    assert "got one of CN=Inspection CA" in found.message
    assert f"its operator has to pass {address} through unopened" in found.fix
    assert "or a proxy on the way opens TLS" in reason


def test_a_relay_by_the_name_in_tls_needs_no_port_of_its_own(
    secure: Coordinator, workspace: Workspace, pki: Pki, tmp_path: Path
) -> None:
    """nginx passes what asks for the coordinator's name to it, unopened, so the device's certificate arrives."""
    port = free_port()
    daemon = Daemon(workspace, At(f"{NAME}:{port}"), "by-name", tls=tls_of(pki, "by-name"), insecure=False)
    with passthrough(tmp_path, port, secure.address), hosts(workspace, daemon, f"127.0.0.1 {NAME}"):
        daemon.start()
        daemon.logged("registered")


@contextmanager
def hosts(workspace: Workspace, daemon: Daemon, line: str) -> Iterator[Path]:
    """A hosts file that only this daemon sees, in place of /etc/hosts. Skips the test where this user may not mount."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("this user may not make a namespace of mounts: the test needs root")
    file = workspace.folder / "hosts"
    file.write_text(f"{line}\n", encoding="utf-8")
    daemon.under = ["unshare", "--mount", "sh", "-c", f'mount --bind "{file}" /etc/hosts && exec "$@"', "sh"]
    yield file


def test_a_name_with_a_new_address_is_looked_up_again(workspace: Workspace) -> None:
    """A daemon that runs finds the coordinator when its name gets another address."""
    server = Coordinator(workspace).serve()
    port = server.address.rpartition(":")[2]
    daemon = Daemon(workspace, At(f"{NAME}:{port}"), "moved", insecure_remote=True)
    with hosts(workspace, daemon, f"127.0.0.2 {NAME}") as file:
        daemon.start()
        eventually(lambda: daemon.events("disconnected"), "nothing is at the first address")
        with file.open("r+", encoding="utf-8") as opened:  # in place: a new file would not be the one that is mounted
            opened.write(f"127.0.0.1 {NAME}\n")
        server.until_present("moved")


@pytest.mark.parametrize(("listen", "asked"), [("[::1]", "[::1]"), ("[::]", "127.0.0.1"), ("[::]", "[::1]")])
def test_ipv6_and_dual_stack(workspace: Workspace, listen: str, asked: str) -> None:
    """A coordinator at an address of IPv6 alone, and one that serves both."""
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    settings = {"listen": f"{listen}:0", "insecure_remote": True}
    server = Coordinator(workspace, settings=settings).serve()
    Daemon(workspace, At(f"{asked}:{server.address.rpartition(':')[2]}"), "six").start()
    server.until_present("six")


def test_the_doctor_measures_silence(secure: Coordinator, pki: Pki) -> None:
    """In plain text and with TLS a path without limits passes."""
    [found] = idle.check(config_of(secure.address, tls=tls_of(pki, "silent")), (0.1, 0.2, 0.3))
    assert (found.level, found.message) == (Level.OK, "a silent connection survives 0.3 s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forgets", "level", "fix"),
    [
        (8.0, Level.WARN, "set keepalive_s = 4 in the settings"),
        (2.5, Level.FAIL, "a firewall, NAT or load balancer on the way forgets it"),
    ],
)
def test_a_path_that_forgets_silent_connections_is_found(
    secure: Coordinator, pki: Pki, forgets: float, level: Level, fix: str
) -> None:
    """The finding says which silence was survived, and which setting or device has to change."""
    config = config_of(secure.address, tls=tls_of(pki, "forgotten"))
    with silent_relay(secure.address, forgets) as address:
        [found] = idle.check(config.model_copy(update={"server": address}), (0.5, 4.0, 16.0))
    assert (found.level, fix in found.fix) == (level, True), found


def test_a_daemon_pings_as_often_as_its_settings_say(workspace: Workspace) -> None:
    """The shortest time is within what a coordinator accepts: the connection stays."""
    server = Coordinator(workspace).serve()
    daemon = Daemon(workspace, server, "pings", keepalive_s=20.0).start()
    server.until_present("pings")
    assert not daemon.events("disconnected")
