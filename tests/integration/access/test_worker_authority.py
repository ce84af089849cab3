"""Workers with a certificate of an authority for workers only, beside the one that devices see, as in a cluster."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from fl_ops.admin.settings import Certificates
from tests.marks import slow_except
from tests.processes.certificates import Pki, credentials, section, server_section
from tests.processes.federation import Daemon, SecureCoordinator
from tests.processes.process import Workspace
from tests.processes.workers import Worker
from tests.processes.workers import section as workers_section

ONE = {"clients_per_round": 1, "min_clients": 1}


@dataclass
class Authorities:
    """The one of operators, and one for each other role. The coordinator does not trust `strangers`."""

    operators: Pki
    clients: Pki
    servers: Pki
    workers: Pki
    strangers: Pki

    @classmethod
    def made(cls, folder: Path) -> Authorities:
        """New ones."""
        return cls(
            Pki(folder / "operators"),
            Pki(folder / "clients", "Devices", "client"),
            Pki(folder / "servers", "Coordinators", "server"),
            Pki(folder / "workers", "Workers", "worker"),
            Pki(folder / "strangers", "Strangers", "worker"),
        )

    @property
    def of_callers(self) -> Path:
        """The bundle that a coordinator and its workers trust."""
        bundle = self.operators.folder / "client-ca.crt"
        bundle.write_bytes(b"".join(pki.ca.read_bytes() for pki in (self.operators, self.clients, self.workers)))
        return bundle


@dataclass
class Site:
    """A coordinator and two workers, which share their two certificates."""

    authorities: Authorities
    server: SecureCoordinator
    workers: list[Worker]
    shared: Certificates
    """What both workers show to the coordinator."""

    def refuses(self, setting: str, own: Certificates) -> bool:
        """Whether TLS refuses a caller at a port."""
        address = self.server.settings["workers"]["listen"] if setting == "workers" else self.server.address
        trusting = replace(own, ca=self.authorities.servers.ca)
        with grpc.secure_channel(str(address), credentials(trusting)) as channel:
            try:
                grpc.channel_ready_future(channel).result(1.5)
            except grpc.FutureTimeoutError:
                return True
        return False


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The processes of this file."""
    with Workspace(tmp_path_factory.mktemp("site")) as workspace:
        made = Authorities.made(workspace.folder / "pki")
        of_server = server_section(made.servers.issue("server", "coordinator")) | {"client_ca": str(made.of_callers)}
        server = SecureCoordinator(workspace, made.operators, {"tls": of_server, "workers": workers_section()})
        server._alice = replace(server._alice, ca=made.servers.ca)
        server.serve()
        for_devices = made.servers.issue("server", "data")
        shared = made.workers.issue("worker", "data")
        own = {
            "tls": server_section(for_devices) | {"client_ca": str(made.of_callers)},
            "worker_tls": section(replace(shared, ca=made.servers.ca)),
        }
        yield Site(made, server, [Worker(workspace, server, f"worker-{n}", own).serve() for n in range(2)], shared)


def test_two_workers_share_a_certificate(site: Site, tmp_path: Path) -> None:
    """A device that trusts coordinators alone trains through them. A new certificate of theirs disturbs no round."""
    attached = site.server.events("worker_attached")
    assert {line["worker"].partition("/")[0] for line in attached} == {"data"}
    assert len({line["worker"] for line in attached}) == 2
    with Workspace(tmp_path) as workspace:
        files = replace(site.authorities.clients.issue("client", "edge-1"), ca=site.authorities.servers.ca)
        Daemon(workspace, site.server, "edge-1", insecure=False, tls=section(files)).start()
        site.server.until_present("edge-1")
        site.server.create("shared", round=ONE, stop={"rounds": 4})
        site.server.until("shared", lambda run: run.rounds_done, "a round is committed")
        renewed = site.authorities.workers.issue("worker", "data-2")
        shutil.copy(renewed.key, site.shared.key)
        shutil.copy(renewed.cert, site.shared.cert)
        for worker in site.workers:
            assert worker.logged("certificates_renewed")["section"] == "worker_tls"
            worker.logged("attached", 2)
        site.server.completed("shared")
        again = site.server.create("again", round=ONE, stop={"rounds": 4})
        assert site.server.digests(again) == site.server.digests("shared")
    assert {line["worker"].partition("/")[0] for line in site.server.events("worker_attached")[2:]} == {"data-2"}
    measured = site.server.metrics().decode()
    assert "fl_workers 2.0" in measured
    assert ('rpc="ReceiveUpdate"' in measured, 'rpc="SubmitUpdate"' in measured) == (True, False)


@pytest.mark.parametrize("signer", slow_except(["clients", "servers", "strangers"], "clients"))
def test_a_worker_of_another_authority_is_refused(site: Site, signer: str) -> None:
    """TLS itself refuses a certificate with the role worker that another authority signed."""
    pki: Pki = getattr(site.authorities, signer)
    assert site.refuses("workers", pki.issue("worker", "mallory"))
    assert not site.refuses("workers", site.authorities.workers.issue("worker", "data-3"))


@pytest.mark.parametrize("role", slow_except(["admin", "operator", "client", "server"], "admin"))
def test_the_key_of_the_workers_authority_makes_workers_only(site: Site, role: str) -> None:
    """TLS refuses the certificate of any other role at the workers' port and at the clients'."""
    stolen = site.authorities.workers.issue(role, "mallory")
    assert site.refuses("workers", stolen)
    assert site.refuses("listen", stolen)


def test_a_worker_without_its_certificate_is_refused(site: Site, tmp_path: Path) -> None:
    """What devices see has not the role: a worker that shows it to the coordinator serves nobody, and says why."""
    with Workspace(tmp_path) as workspace:
        for_devices = server_section(site.authorities.servers.issue("server", "bare"))
        worker = Worker(workspace, site.server, "bare", {"tls": for_devices}).start()
        assert "UNAVAILABLE" in worker.logged("detached")["reason"]
        assert not worker.events("serving")
