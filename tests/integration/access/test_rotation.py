"""Certificates are renewed under load without any effect on runs, and old authorities are no longer trusted."""

from __future__ import annotations

import contextlib
import os
import shutil
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from fl_ops.admin.client import AdminClient
from fl_ops.admin.settings import Certificates
from fl_ops.commands.cli import app
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import TIMEOUT_S, Workspace
from tests.processes.raw_client import RawClient

NAMES = ("edge-0", "edge-1", "edge-2")
MODEL = {"task": {"options": {"model": "broad"}}, "stop": {"rounds": 1000}}
"""Updates of 256 KiB, in chunks of 64."""


class Mount:
    """A folder as Kubernetes mounts a secret: its files lead through one link, which is replaced in one step."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.number = folder, 0
        folder.mkdir()

    def put(self, pki: Path, stem: str, bundle: Sequence[Path]) -> None:
        """Replace all contents in one step."""
        self.number += 1
        version = self.folder / f"..{self.number}"
        version.mkdir()
        for name, content in (("tls.crt", f"{stem}.crt"), ("tls.key", f"{stem}.key")):
            shutil.copy(pki / content, version / name)
        (version / "ca.crt").write_bytes(b"".join((authority / "ca.crt").read_bytes() for authority in bundle))
        (self.folder / "..new").symlink_to(version.name)
        (self.folder / "..new").rename(self.folder / "..data")
        for name in ("tls.crt", "tls.key", "ca.crt"):
            if not os.path.lexists(self.folder / name):
                (self.folder / name).symlink_to(f"..data/{name}")

    def tls(self, authority: str) -> dict[str, str]:
        """The [tls] section of the settings."""
        files = {"cert": "tls.crt", "key": "tls.key", authority: "ca.crt"}
        return {key: str(self.folder / name) for key, name in files.items()}


class Site:
    """A coordinator and three daemons with certificates that an operator renews."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.pki, self.next = workspace, workspace.folder / "pki", workspace.folder / "next"
        self.ca("init")
        self.ca("issue", "server", "--host", "127.0.0.1")
        self.ca("issue", "admin", "alice")
        for name in NAMES:
            self.ca("issue", "client", name)
        self.ca("init", "--dir", "next")
        stems = ("server-coordinator", *(f"client-{name}" for name in NAMES))
        self.mounts = {stem: Mount(workspace.folder / stem) for stem in stems}
        self.deploy(self.pki, self.pki)
        tls = {"insecure": False, "tls": self.mounts["server-coordinator"].tls("client_ca")}
        self.server = Secure(workspace, settings={**tls, "limits": {"chunk_bytes": 64 << 10}})
        self.server.site = self
        self.server.serve()
        self.daemons = {name: self._daemon(index, name).start() for index, name in enumerate(NAMES)}
        for name in NAMES:
            self.server.until_present(name)

    def _daemon(self, index: int, name: str) -> Daemon:
        shard = {"partition": {"method": "iid", "clients": len(NAMES), "seed": 1}, "index": index}
        tls = self.mounts[f"client-{name}"].tls("ca")
        options = {"model": "broad", "step_s": 0.02}
        settings: dict[str, Any] = {
            "insecure": False,
            "tls": tls,
            "shard": shard,
            "options": options,
            "metrics_listen": "",
        }
        return Daemon(self.workspace, self.server, name, **settings)

    def ca(self, *arguments: str) -> None:
        """Run `fl ca` in the site's folder."""
        with contextlib.chdir(self.workspace.folder):
            made = CliRunner().invoke(app, ["ca", *arguments])
        assert made.exit_code == 0, made.stderr

    def deploy(self, pki: Path, *bundle: Path) -> None:
        """Install the certificates of this folder and these trusted authorities everywhere."""
        for stem, mount in self.mounts.items():
            mount.put(pki, stem, bundle)

    def rotate(self, pki: Path, *bundle: Path) -> None:
        """Deploy under load; wait until all daemons have reconnected and three more rounds are committed."""
        number = len(self.server.events("certificates_renewed")) + 1
        self.deploy(pki, *bundle)
        self.server.logged("certificates_renewed", number)
        for daemon in self.daemons.values():
            daemon.logged("moved", number)
        rounds = len(self.server.events("round_committed"))
        self.server.logged("round_committed", rounds + 3)

    def newcomer(self, pki: Path, trusts: Path) -> grpc.StatusCode | None:
        """The status of a registration with edge-0's certificate from this folder; None if accepted."""
        files = ((trusts / "ca.crt"), pki / "client-edge-0.key", pki / "client-edge-0.crt")
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
        with RawClient(self.server.address, "edge-9", credentials) as client:
            try:
                client.register()
            except grpc.RpcError as error:
                return error.code()
        return None


class Secure(Coordinator):
    """A coordinator and an operator with certificates of the same authority."""

    site: Site

    def admin(self, certificates: Certificates | None = None) -> AdminClient:
        pki = self.site.next if (self.site.next / "admin-alice.crt").exists() else self.site.pki
        root = self.site.mounts["server-coordinator"].folder / "ca.crt"
        return super().admin(Certificates(root, pki / "admin-alice.crt", pki / "admin-alice.key"))

    def samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        """A metric's samples: (labels, value)."""
        with urllib.request.urlopen(f"http://{self.settings['metrics_listen']}/metrics", timeout=TIMEOUT_S) as page:
            families = text_string_to_metric_families(page.read().decode())
            return [(each.labels, each.value) for family in families for each in family.samples if each.name == name]


@pytest.fixture
def site(workspace: Workspace) -> Site:
    """A connected site with certificates of the first authority."""
    return Site(workspace)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_certificates_are_renewed_under_load(site: Site) -> None:
    """New pairs, then a bundle of two authorities, pairs of the second, and the second alone.

    One registration for each daemon, one attempt for each round, no call refused or repeated, and the models are those
    of an undisturbed run. In the end a certificate of the first authority is refused.
    """
    run = site.server.create("rotated", **MODEL)
    site.server.logged("round_committed", 2)
    old = shutil.copytree(site.pki, site.workspace.folder / "old")
    site.ca("renew")
    site.rotate(site.pki, site.pki)
    site.rotate(site.pki, site.pki, site.next)
    site.ca("renew", "--from", "pki", "--dir", "next")
    site.rotate(site.next, site.pki, site.next)
    assert site.newcomer(old, site.next) is grpc.StatusCode.PERMISSION_DENIED  # known, but not as edge-9
    site.rotate(site.next, site.next)
    assert site.newcomer(old, site.next) is grpc.StatusCode.UNAVAILABLE
    assert site.newcomer(site.next, site.next) is grpc.StatusCode.PERMISSION_DENIED
    with site.server.admin() as admin:
        admin.runs.pause_run(run)
        site.server.until(run, lambda status: status.rounds_done == len(attempts(site)), "its round is committed")
        check_no_effect(site)
        admin.runs.stop_run(run, "it has seen enough")
    leaf = x509.load_pem_x509_certificate((site.next / "server-coordinator.crt").read_bytes())
    ends = site.server.samples("fl_certificate_expiry_timestamp_seconds")
    assert ({"file": "cert"}, leaf.not_valid_after_utc.timestamp()) in ends
    digests = [summary.model_digest for summary in site.server.rounds(run)]
    undisturbed = site.server.create("undisturbed", task=MODEL["task"], stop={"rounds": len(digests)})
    assert site.server.digests(undisturbed) == digests


def attempts(site: Site) -> list[tuple[int, int]]:
    """Round and number of each attempt."""
    return [(line["round"], line["attempt"]) for line in site.server.events("attempt_opened", run="rotated")]


def check_no_effect(site: Site) -> None:
    """Check that the renewal had no effect on daemons, calls, attempts and uploads."""
    server, began = site.server, attempts(site)
    assert began == [(number, began[0][1]) for number in range(len(began))]
    for event in ("client_lost", "upload_resumed", "update_refused", "rpc_failed"):
        assert server.events(event) == [], event
    refused = [line for line in server.events("rpc_refused") if "edge-9" not in line["error"]]
    assert refused == []
    for daemon in site.daemons.values():
        assert len(daemon.events("registered")) == 1
        for event in ("disconnected", "not_moved", "certificates_not_used", "work_failed", "update_refused"):
            assert daemon.events(event) == [], event
    calls = {(labels["rpc"], labels["code"]): value for labels, value in server.samples("fl_rpc_seconds_count")}
    assert {code for _, code in calls} <= {"OK", "PERMISSION_DENIED"}
    sent = [line for daemon in site.daemons.values() for line in daemon.events("submitted")]
    assert calls["SubmitUpdate", "OK"] == len(sent) == 2 * len(began)
    moves = [line for daemon in site.daemons.values() for line in daemon.events("moved")]
    assert calls["Attend", "OK"] == len(moves)  # each has ended the stream before it


@pytest.mark.slow
def test_files_that_do_not_match_are_logged_and_not_used(site: Site) -> None:
    """A certificate without its key, on both sides; then another client's certificate on a device."""
    server, edge = site.server, site.daemons["edge-0"]
    site.ca("renew")
    for stem in ("server-coordinator", "client-edge-0"):
        key = site.mounts[stem].folder / "tls.key"
        key.unlink()
        shutil.copy(site.pki / f"{stem}.key", key)
    for process in (server, edge):
        assert "tls.key: expected the private key of" in process.logged("certificates_not_used")["reason"]
    assert site.newcomer(site.pki, site.pki) is grpc.StatusCode.PERMISSION_DENIED
    site.mounts["server-coordinator"].put(site.pki, "server-coordinator", [site.pki])
    server.logged("certificates_renewed")
    stranger = site.mounts["client-edge-0"].folder
    for kind in ("crt", "key"):
        (stranger / f"tls.{kind}").unlink()
        shutil.copy(site.pki / f"client-edge-1.{kind}", stranger / f"tls.{kind}")
    reason = edge.logged("certificates_not_used", 2)["reason"]
    assert "tls.cert: expected a new certificate of 'edge-0', got fl://client/edge-1" in reason
    run = server.create("goes-on", task=MODEL["task"], stop={"rounds": 2}, round={"clients_per_round": 3})
    server.completed(run)
    assert edge.events("disconnected") == edge.events("moved") == []
