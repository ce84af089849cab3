"""`fl ca rotate` while daemons train: the authority and its key are replaced, and no device enrolls again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner, Result

from fl_common.certificates.leaf import is_issuer
from fl_common.certificates.pem import fingerprint, fingerprints
from fl_ops.certificates.rotation import Rotation, Stage
from fl_ops.commands.cli import app
from tests.integration.access.test_renewal import Site, endless
from tests.processes.certificates import server_section
from tests.processes.process import Workspace, eventually
from tests.processes.workers import Worker, section

LONG_S = 240.0
"""For steps that wait until every daemon has renewed its certificate."""


def fl_ca(site: Site, *arguments: str) -> Result:
    """Run `fl ca` as alice, with the files of the site's folder."""
    pki = site.server.pki.folder
    files = ("--ca", str(pki / "ca.crt"), "--cert", str(pki / "admin-alice.crt"), "--key", str(pki / "admin-alice.key"))
    where = ("--server", str(site.server.settings["admin_listen"]))
    return CliRunner().invoke(app, ["ca", *arguments, *where, *files])


def rotate(site: Site, *arguments: str) -> Result:
    """Run `fl ca rotate` in the site's folder."""
    return fl_ca(site, "rotate", *arguments, "--dir", str(site.server.pki.folder))


def accepted(site: Site, *arguments: str) -> bool:
    """Whether a step of the rotation is done. A refusal has changed nothing that is used."""
    done = rotate(site, *arguments)
    assert done.exit_code in {0, 1, 3}, done.stderr  # 3: the coordinator is being started again
    return done.exit_code == 0


def assert_refused(result: Result, why: str) -> None:
    """A step of the rotation is refused for this reason."""
    assert result.exit_code == 1
    assert why in result.stderr


def of_device(site: Site, name: str) -> tuple[x509.Certificate, list[str]]:
    """A device's certificate, and the fingerprints of the authorities that it trusts."""
    current = Path(site.daemons[name].settings["state_dir"]) / "tls" / "current"
    leaf = x509.load_pem_x509_certificate((current / "tls.crt").read_bytes())
    return leaf, fingerprints((current / "ca.crt").read_bytes())


def restart(site: Site) -> None:
    """Kill the coordinator, and start it again."""
    site.server.kill()
    site.server.serve()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_authority_is_replaced_while_daemons_train(workspace: Workspace) -> None:
    """Both are trusted, the new one signs, the old one is dropped; the coordinator is killed after each step.

    A step is refused before the devices are ready for it. Nobody registers with a token again, and the models are those
    of an undisturbed run. All bytes go through a worker, whose certificate follows.
    """
    site = Site(workspace, 3, lifetime_s=20.0, more={"workers": section()})
    files = site.server.pki.issue("worker", "one")
    worker = Worker(workspace, site.server, "worker", {"tls": server_section(files)}).serve()
    run = site.server.create("rotated", **endless(3))
    site.server.logged("round_committed", 2)
    assert rotate(site).exit_code == 0
    assert_refused(rotate(site), "the coordinator does not trust the new authority yet")
    restart(site)
    rotation = Rotation.of(site.server.pki.folder)
    assert (rotation.stage, rotation.new is None) == (Stage.TRUSTED, False)
    eventually(partial(accepted, site), "every device trusts the new authority", within_s=LONG_S)
    worker.logged("certificates_renewed", 2)
    assert_refused(rotate(site, "--finish"), "the old authority")
    restart(site)
    eventually(partial(accepted, site, "--finish"), "no device has a certificate of the old one", within_s=LONG_S)
    site.server.logged("authority_renewed")
    restart(site)
    new = rotation.new
    assert new is not None
    names = list(site.daemons)

    def only_the_new_one() -> bool:
        devices = [of_device(site, name) for name in names]
        return all(is_issuer(new, leaf) and trusted == [fingerprint(new)] for leaf, trusted in devices)

    eventually(only_the_new_one, "the devices trust the new authority alone", within_s=LONG_S)
    attached = len(worker.events("attached"))
    restart(site)
    worker.logged("attached", attached + 1)
    shown = fl_ca(site, "status")
    assert shown.exit_code == 0, shown.stderr
    assert "Tests 2" in shown.stdout
    site.server.logged("round_committed", len(site.server.events("round_committed")) + 2)
    digests = stopped(site, run)
    assert site.server.events("certificate_issued", rpc="Enroll") == site.server.events("certificate_issued")[:3]
    undisturbed = site.server.create("undisturbed", **{**endless(3), "stop": {"rounds": len(digests)}})
    assert site.server.digests(undisturbed) == digests


def stopped(site: Site, run: str) -> list[str]:
    """End the run between two rounds; gives the digests of its models."""
    with site.server.admin() as admin:
        admin.runs.pause_run(run)
        site.server.until(run, lambda status: not status.cohort, "its round is committed")
        admin.runs.stop_run(run, "it has seen enough")
    return [summary.model_digest for summary in site.server.rounds(run)]
