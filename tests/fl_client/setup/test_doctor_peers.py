"""The doctor's line on secure aggregation: who signs the other clients' keys, and what that protects from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.fl_client.setup.conftest import Doctor, DoctorReport, Site


@pytest.fixture
def doctor(doctor: Doctor, site: Site, tmp_path: Path) -> Doctor:
    """The doctor of a device with a certificate and a policy file, without a coordinator."""

    def of_policy(policy: str = "", **changes: Any) -> DoctorReport:
        path = tmp_path / "policy.toml"
        path.write_text(policy, encoding="utf-8")
        given = {"server": "127.0.0.1:9", "policy": path, **changes}
        return doctor(**given if "client_id" in given else {"tls": site.issue("client", "edge-1"), **given})

    return of_policy


def rules(*lines: str) -> str:
    """The section of a policy."""
    return "\n".join(["[secure_aggregation]", *lines])


def test_authorities_of_the_coordinators_certificate(doctor: Doctor) -> None:
    """They are named; it is a warning if the site demands secure aggregation."""
    found = doctor()
    assert "signed by CN=Impetus CA, of tls.ca. The coordinator holds the authority" in found.of("peers")
    assert not [fault for fault in found.faults if "peers" in fault]
    found = doctor(rules("require = true"))
    assert "WARN peers" in found.faults
    assert "secure_aggregation.authority of the policy" in found.of("peers")


def test_an_authority_outside(doctor: Doctor, strangers: Site) -> None:
    """The policy's own file: the coordinator invents nobody."""
    found = doctor(rules("require = true", f'authority = "{strangers.folder / "ca.crt"}"'))
    assert "signed by CN=Other CA, of the policy." in found.of("peers")
    assert "it cannot invent clients" in found.of("peers")
    assert "WARN peers" not in found.faults


def test_an_authority_that_the_coordinator_holds_after_all(doctor: Doctor, site: Site, tmp_path: Path) -> None:
    """A device that renews at the coordinator has a certificate of the coordinator's authority."""
    authority = rules(f'authority = "{site.folder / "ca.crt"}"')
    assert "WARN peers" not in doctor(authority).faults
    current, files = tmp_path / "enrolled" / "tls" / "current", site.issue("client", "edge-1")
    current.mkdir(parents=True)
    enrolled = {"ca": current / "ca.crt", "cert": current / "tls.crt", "key": current / "tls.key"}
    for name, path in enrolled.items():
        shutil.copy(files[name], path)
    found = doctor(authority, tls={**enrolled, "renew": True})
    assert "WARN peers" in found.faults
    assert "which signs what this device renews at the coordinator" in found.of("peers")


def test_pinned_keys(doctor: Doctor) -> None:
    """The number of clients, and that nobody else is summed with them."""
    pins = "\n".join(["[secure_aggregation.peers]", *(f'edge-{number} = "{"ab" * 32}"' for number in range(3))])
    found = doctor(pins)
    assert "keys of 3 clients in the policy. The other clients' keys are pinned" in found.of("peers")


def test_what_cannot_work(doctor: Doctor, tmp_path: Path) -> None:
    """An authority that is no certificate, and a device without one that demands secure aggregation."""
    (tmp_path / "no.crt").write_text("no certificate", encoding="utf-8")
    found = doctor(rules(f'authority = "{tmp_path / "no.crt"}"'))
    assert "FAIL peers" in found.faults
    assert "expected a certificate in PEM" in found.of("peers")
    found = doctor(rules("require = true"), client_id="edge-1", insecure=True)
    assert "FAIL peers" in found.faults
    assert "certificates sign the keys" in found.of("peers")
