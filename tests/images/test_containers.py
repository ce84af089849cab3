"""The images at work: a coordinator in a read-only container, daemons outside and in another container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_ops.admin.client import AdminClient
from fl_ops.admin.settings import Certificates
from tests.images.containers import ContainedCoordinator, ContainedDaemon
from tests.images.podman import Podman
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace, run_fl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

GRACE_S = 40
"""As much as the coordinator's `drain_grace_s` and what it needs to close, and some seconds more."""
CLIENTS = ("edge-0", "edge-1", "edge-2")
TLS = "/etc/impetus/tls"
THREE = {"clients_per_round": 3, "min_clients": 3}


class Secure(ContainedCoordinator):
    """A coordinator with certificates and the operator alice."""

    def admin(self, certificates: Certificates | None = None) -> AdminClient:
        return super().admin(certificates or certificates_of(self.folder, "admin-alice"))


def certificates_of(folder: Path, stem: str) -> Certificates:
    """The files of one holder, as `fl ca` names them."""
    pki = folder / "pki"
    return Certificates(pki / "ca.crt", pki / f"{stem}.crt", pki / f"{stem}.key")


def mount_tls(process: ContainedCoordinator | ContainedDaemon, stem: str) -> None:
    """Put a holder's files where a Secret would be mounted."""
    folder = process.mounted / "tls"
    folder.mkdir(parents=True)
    files = certificates_of(process.folder, stem)
    for source, name in ((files.ca, "ca.crt"), (files.cert, "tls.crt"), (files.key, "tls.key")):
        (folder / name).write_bytes(source.read_bytes())
        (folder / name).chmod(0o400)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A folder with an authority and what it issued."""
    folder = tmp_path_factory.mktemp("containers")
    issue = [("server", "--host", "127.0.0.1"), *(("client", name) for name in CLIENTS), ("admin", "alice")]
    for arguments in (("init",), *(("issue", *each) for each in issue)):
        made = run_fl("ca", *arguments, "--dir", "pki", folder=folder)
        assert made.returncode == 0, made.stderr
    with Workspace(folder) as workspace:
        yield workspace


@pytest.fixture(scope="module")
def server(podman: Podman, workspace: Workspace) -> Coordinator:
    """The coordinator's image, serving over mTLS."""
    tls = {"cert": f"{TLS}/tls.crt", "key": f"{TLS}/tls.key", "client_ca": f"{TLS}/ca.crt"}
    server = Secure(podman, workspace, {"insecure": False, "tls": tls})
    mount_tls(server, "server-coordinator")
    return server.serve()


@pytest.fixture(scope="module")
def daemons(podman: Podman, workspace: Workspace, server: ContainedCoordinator) -> list[Daemon]:
    """Two daemons that are processes of this machine, and one in the client's image; all of them attend."""
    daemons: list[Daemon] = [outside(workspace, server, index) for index in (0, 1)]
    tls = {"ca": f"{TLS}/ca.crt", "cert": f"{TLS}/tls.crt", "key": f"{TLS}/tls.key"}
    contained = ContainedDaemon(podman, workspace, server, CLIENTS[2], insecure=False, tls=tls, shard=shard(2))
    mount_tls(contained, f"client-{CLIENTS[2]}")
    daemons.append(contained)
    for daemon in daemons:
        daemon.start()
    attend(server)
    return daemons


def outside(workspace: Workspace, server: ContainedCoordinator, index: int) -> Daemon:
    """A daemon that is not in a container."""
    files = certificates_of(workspace.folder, f"client-{CLIENTS[index]}")
    tls = {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
    return Daemon(workspace, server, CLIENTS[index], insecure=False, tls=tls, shard=shard(index))


def shard(index: int) -> dict[str, Any]:
    """One of three equal parts."""
    return {"partition": {"method": "iid", "clients": 3, "seed": 1}, "index": index}


def attend(server: ContainedCoordinator) -> None:
    """Wait until all three are there."""
    for name in CLIENTS:
        server.until_present(name)


@pytest.fixture(scope="module")
def trained(server: ContainedCoordinator, daemons: list[Daemon]) -> str:
    """A run of two rounds that all three took part in; its id."""
    run = server.create("in-containers", round=THREE, stop={"rounds": 2})
    assert len(server.digests(run)) == 2
    return run


def test_a_run_completes_through_the_images(server: ContainedCoordinator, daemons: list[Daemon], trained: str) -> None:
    """Two rounds over mTLS; the client in the container has its part in both, as those outside have."""
    assert [summary.accepted for summary in server.rounds(trained)] == [3, 3]
    daemons[2].logged("outcome", 2, run=trained, counted=True)


def test_it_runs_without_root_on_a_read_only_root(server: ContainedCoordinator, trained: str) -> None:
    """The process is 10001, has no capability, may gain none, and only its state can be written."""
    status = server.execute("cat", "/proc/1/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert (int(fields["CapEff"], 16), fields["NoNewPrivs"]) == (0, "1")
    assert "Read-only file system" in server.execute("touch", "/opt/impetus/x").stderr
    assert server.execute("ls", "/var/lib/impetus").stdout.split() != []


def test_a_coordinator_stops_within_the_grace_and_keeps_its_state(
    server: ContainedCoordinator, daemons: list[Daemon], trained: str
) -> None:
    """SIGTERM as the platform sends it: exit code 0, not 137. A new container on the same volume goes on from there."""
    before = server.digests(trained)
    assert server.stop(GRACE_S) == 0
    server.serve()
    assert server.digests(trained) == before
    attend(server)
    again = server.create("after-the-restart", round=THREE, stop={"rounds": 1})
    assert len(server.digests(again)) == 1


def test_a_daemon_stops_within_the_grace(server: ContainedCoordinator, daemons: list[Daemon], trained: str) -> None:
    """SIGTERM to the client's image: exit code 0, and its state is on the volume."""
    contained = daemons[2]
    assert isinstance(contained, ContainedDaemon)
    assert contained.stop(GRACE_S) == 0
    assert list((daemons[2].folder / f"{CLIENTS[2]}-volume").iterdir())
    daemons[2].start()
    attend(server)


def test_a_start_without_settings_is_refused(podman: Podman, server: ContainedCoordinator) -> None:
    """What an operator sees who forgot the volume: the file's name and exit code 2, no traceback."""
    done = podman.inside(server.image, "fl-server", "--config", "/etc/impetus/server.toml")
    assert done.returncode == 2
    assert "/etc/impetus/server.toml" in done.stderr
    assert "Traceback" not in done.stderr
