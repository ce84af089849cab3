"""Real coordinators to be looked at, in plain text and with certificates, and the doctor's findings as values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fl_client.__main__ import main
from fl_ops import ca
from tests.integration.harness import Coordinator
from tests.integration.processes import Place, write_toml

TASK = "tests.integration.tiny_task:Tiny"


@dataclass(frozen=True)
class Site:
    """An authority, and what it issues into a folder."""

    folder: Path
    authority: ca.Authority

    @classmethod
    def made(cls, folder: Path, name: str = "Impetus CA") -> Site:
        """A new one, with its certificate in ca.crt."""
        folder.mkdir()
        now = datetime.now(UTC)
        # Made two years ago, so that it can have issued what has ended since.
        authority = ca.make_authority(name, ca.Validity(now - timedelta(days=730), 3650))
        (folder / "ca.crt").write_bytes(ca.certificate_pem(authority.certificate))
        return cls(folder, authority)

    def issue(
        self, role: str, name: str, hosts: tuple[str, ...] = (), *, since: int = 0, days: int = 90
    ) -> dict[str, str]:
        """A certificate from `since` days ago: paths of ca, cert and key as they stand in settings."""
        start = datetime.now(UTC) - timedelta(days=since)
        certificate, key = ca.issue(self.authority, ca.Identity(role, name, hosts), ca.Validity(start, days))
        cert, key_file = self.folder / f"{name}-{since}.crt", self.folder / f"{name}-{since}.key"
        cert.write_bytes(ca.certificate_pem(certificate))
        key_file.write_bytes(ca.key_pem(key))
        key_file.chmod(0o600)
        return {"ca": str(self.folder / "ca.crt"), "cert": str(cert), "key": str(key_file)}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The authority that everybody here trusts."""
    return Site.made(tmp_path_factory.mktemp("pki") / "site")


@pytest.fixture(scope="session")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """An authority that nobody here trusts."""
    return Site.made(tmp_path_factory.mktemp("pki") / "strangers", "Other CA")


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator in plain text."""
    with Place(tmp_path_factory.mktemp("plain")) as place:
        yield Coordinator(place).serve()


@pytest.fixture(scope="session")
def tls_server(tmp_path_factory: pytest.TempPathFactory, site: Site) -> Iterator[Coordinator]:
    """A coordinator with mTLS."""
    files = site.issue("server", "coordinator", ("127.0.0.1", "localhost"))
    tls = {"cert": files["cert"], "key": files["key"], "client_ca": files["ca"]}
    with Place(tmp_path_factory.mktemp("tls")) as place:
        yield Coordinator(place, settings={"tls": tls, "insecure": False}).serve()


class Look:
    """What the doctor found."""

    def __init__(self, code: int, told: dict) -> None:
        self.code = code
        self.healthy = told["healthy"]
        self.findings = told["findings"]

    @property
    def faults(self) -> list[str]:
        """What was looked at and is not well, and how bad it is."""
        return [f"{each['level']} {each['check']}" for each in self.findings if each["level"] != "OK"]

    def of(self, check: str) -> str:
        """All that was said of one thing, with what to do."""
        return "\n".join(f"{each['said']} | {each['mend']}" for each in self.findings if each["check"] == check)


@pytest.fixture
def look(tmp_path, capsys):
    """Writes settings with these changes, and has the doctor look."""

    def look(**changes) -> Look:
        settings = {"state_dir": tmp_path / "state", "task": {"name": TASK}, **changes}
        if "tls" not in settings:
            settings = {"client_id": "edge-1", "insecure": True, **settings}
        path = tmp_path / "client.toml"
        write_toml(path, settings)
        code = main(["doctor", "--config", str(path), "--json"])
        return Look(code, json.loads(capsys.readouterr().out))

    return look
