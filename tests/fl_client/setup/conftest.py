"""Real coordinators, in plain text and with certificates, and the doctor's findings as values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fl_client.__main__ import main
from fl_ops.certificates import ca
from tests.processes.federation import Coordinator
from tests.processes.process import Workspace, write_toml

TASK = "tests.processes.tiny_task:Tiny"


@dataclass(frozen=True)
class Site:
    """A certificate authority that issues certificates into a folder."""

    folder: Path
    authority: ca.Authority

    @classmethod
    def made(cls, folder: Path, name: str = "Impetus CA") -> Site:
        """A new authority, with its certificate in ca.crt."""
        folder.mkdir()
        now = datetime.now(UTC)
        # Valid since two years ago, so that it can issue certificates that have ended.
        authority = ca.make_authority(name, ca.Validity(now - timedelta(days=730), 3650))
        (folder / "ca.crt").write_bytes(ca.certificate_pem(authority.certificate))
        return cls(folder, authority)

    def issue(
        self, role: str, name: str, hosts: tuple[str, ...] = (), *, since: int = 0, days: int = 90
    ) -> dict[str, str]:
        """Issue a certificate that is valid since `since` days ago. Returns the settings ca, cert and key."""
        start = datetime.now(UTC) - timedelta(days=since)
        certificate, key = ca.issue(self.authority, ca.Identity(role, name, hosts), ca.Validity(start, days))
        cert, key_file = self.folder / f"{name}-{since}.crt", self.folder / f"{name}-{since}.key"
        cert.write_bytes(ca.certificate_pem(certificate))
        key_file.write_bytes(ca.key_pem(key))
        key_file.chmod(0o600)
        return {"ca": str(self.folder / "ca.crt"), "cert": str(cert), "key": str(key_file)}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The authority that the coordinators and devices trust."""
    return Site.made(tmp_path_factory.mktemp("pki") / "site")


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """An authority that nothing trusts."""
    return Site.made(tmp_path_factory.mktemp("pki") / "strangers", "Other CA")


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator in plain text."""
    with Workspace(tmp_path_factory.mktemp("plain")) as workspace:
        yield Coordinator(workspace).serve()


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory, site: Site) -> Iterator[Coordinator]:
    """A coordinator with mTLS."""
    files = site.issue("server", "coordinator", ("127.0.0.1", "localhost"))
    tls = {"cert": files["cert"], "key": files["key"], "client_ca": files["ca"]}
    with Workspace(tmp_path_factory.mktemp("tls")) as workspace:
        yield Coordinator(workspace, settings={"tls": tls, "insecure": False}).serve()


class DoctorReport:
    """The output of the doctor."""

    def __init__(self, code: int, output: dict[str, Any]) -> None:
        self.code = code
        self.healthy: bool = output["healthy"]
        self.findings: list[dict[str, str]] = output["findings"]

    @property
    def faults(self) -> list[str]:
        """Level and check of each warning and failure."""
        return [f"{finding['level']} {finding['check']}" for finding in self.findings if finding["level"] != "OK"]

    def of(self, check: str) -> str:
        """Message and fix of each finding of a check."""
        return "\n".join(
            f"{finding['said']} | {finding['mend']}" for finding in self.findings if finding["check"] == check
        )


Doctor = Callable[..., DoctorReport]
"""Settings that replace the defaults -> the doctor's report."""


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Writes settings with these changes, and runs the doctor."""

    def run(**changes: Any) -> DoctorReport:
        settings = {"state_dir": tmp_path / "state", "task": {"name": TASK}, **changes}
        if "tls" not in settings:
            settings = {"client_id": "edge-1", "insecure": True, **settings}
        path = tmp_path / "client.toml"
        write_toml(path, settings)
        code = main(["doctor", "--config", str(path), "--json"])
        return DoctorReport(code, json.loads(capsys.readouterr().out))

    return run
