"""`fl ca` in a folder, and its certificates in a real mutual TLS handshake over gRPC."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from fl_ops import ca
from fl_ops.errors import Exit
from protos.fl.v1 import admin_pb2


@pytest.fixture
def pki(fl: Any, tmp_path: Path) -> Path:
    """An authority with a server, a client and an admin."""
    fl("ca", "init")
    fl("ca", "issue", "server", "--host", "localhost", "--host", "127.0.0.1")
    fl("ca", "issue", "client", "edge-3")
    assert fl("ca", "issue", "admin", "alice").exit_code == Exit.OK
    return tmp_path / "pki"


def mutual(pki: Path) -> grpc.ServerCredentials:
    """A server that shows its certificate and wants one of the same authority."""
    pair = ((pki / "server-coordinator.key").read_bytes(), (pki / "server-coordinator.crt").read_bytes())
    return grpc.ssl_server_credentials([pair], (pki / "ca.crt").read_bytes(), require_client_auth=True)


def as_who(fake: Any, pki: Path, who: str) -> list[str]:
    """Arguments of a call to the fake with one's certificate."""
    files = {"--ca": pki / "ca.crt", "--cert": pki / f"{who}.crt", "--key": pki / f"{who}.key"}
    return ["--server", fake.address, *(str(part) for pair in files.items() for part in pair)]


@pytest.mark.parametrize(
    ("who", "uri"), [("admin-alice", b"fl://admin/alice"), ("client-edge-3", b"fl://client/edge-3")]
)
def test_handshake(serve: Callable[..., Any], pki: Path, fl: Any, who: str, uri: bytes) -> None:
    """The coordinator learns name and role of its caller from the handshake."""
    fake = serve(mutual(pki))
    fake.answers["ListRuns"] = admin_pb2.ListRunsResponse()
    assert fl("run", "list", *as_who(fake, pki, who)).exit_code == Exit.OK
    assert fake.identities == [[uri]]


def test_stranger(serve: Callable[..., Any], pki: Path, fl: Any, tmp_path: Path) -> None:
    """A certificate of another authority is refused in the handshake, whichever authority its owner trusts."""
    fake = serve(mutual(pki))
    fl("ca", "init", "--dir", "other")
    fl("ca", "issue", "admin", "alice", "--dir", "other")
    arguments = as_who(fake, tmp_path / "other", "admin-alice")
    trusting = [str(pki / "ca.crt") if part.endswith("ca.crt") else part for part in arguments]
    for attempt in (arguments, trusting):
        result = fl("run", "list", *attempt)
        assert result.exit_code == Exit.UNREACHABLE
        assert "authority" in result.stderr
    assert fake.requests == []


def test_plain_text_to_a_tls_port(serve: Callable[..., Any], pki: Path, fl: Any) -> None:
    """Plain text to a port that wants certificates fails and hints at them."""
    fake = serve(mutual(pki))
    result = fl("run", "list", "--insecure", "--server", fake.address)
    assert result.exit_code == Exit.UNREACHABLE
    assert "certificates" in result.stderr


def test_host_that_the_certificate_does_not_name(serve: Callable[..., Any], fl: Any, tmp_path: Path) -> None:
    """A server reached by another host than its certificate names is not trusted, and the error says so."""
    fl("ca", "init")
    fl("ca", "issue", "server", "--host", "fl.example.org")
    fl("ca", "issue", "admin", "alice")
    fake = serve(mutual(tmp_path / "pki"))
    result = fl("run", "list", *as_who(fake, tmp_path / "pki", "admin-alice"))
    assert result.exit_code == Exit.UNREACHABLE
    assert "must name the host" in result.stderr
    assert fake.requests == []


def test_permissions(pki: Path) -> None:
    """Private keys are for their owner only, certificates for everybody, and nothing else is left in the folder."""
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in pki.iterdir()}
    stems = ("ca", "server-coordinator", "client-edge-3", "admin-alice")
    assert modes == {f"{stem}.{kind}": mode for stem in stems for kind, mode in (("key", 0o600), ("crt", 0o644))}


@pytest.mark.parametrize("arguments", [["init"], ["issue", "client", "edge-3"], ["issue", "client", "new"]])
def test_no_overwriting(pki: Path, fl: Any, arguments: list[str]) -> None:
    """A key or certificate that is there is never written over unasked."""
    (pki / "client-new.key").write_text("precious")
    before = {file: file.read_bytes() for file in pki.iterdir()}
    result = fl("ca", *arguments)
    assert result.exit_code == Exit.MISUSED
    assert "not overwritten" in result.stderr
    assert {file: file.read_bytes() for file in pki.iterdir()} == before


def test_renewal(pki: Path, fl: Any) -> None:
    """--force renews a leaf: another key, still private."""
    before = (pki / "client-edge-3.key").read_bytes()
    assert fl("ca", "issue", "client", "edge-3", "--force").exit_code == Exit.OK
    assert (pki / "client-edge-3.key").read_bytes() != before
    assert stat.S_IMODE((pki / "client-edge-3.key").stat().st_mode) == 0o600


def identities(folder: Path) -> dict[str, ca.Identity]:
    """Whom the certificates in a folder are for, but for the authority's."""
    leaves = (file for file in folder.glob("*.crt") if file.stem != "ca")
    return {file.stem: ca.identity_of(x509.load_pem_x509_certificate(file.read_bytes())) for file in leaves}


def test_renewing_all(pki: Path, fl: Any) -> None:
    """Everybody has a new pair that fits together, is of the same holder with the same hosts, and is private."""
    whose, before = identities(pki), {file: file.read_bytes() for file in pki.iterdir()}
    assert fl("ca", "renew").exit_code == Exit.OK
    assert identities(pki) == whose
    assert whose["server-coordinator"].hosts == ("localhost", "127.0.0.1")
    assert {file.stem for file in pki.iterdir() if file.read_bytes() == before[file]} == {"ca"}
    for stem in whose:
        ca.load_pair((pki / f"{stem}.crt").read_bytes(), (pki / f"{stem}.key").read_bytes())
        assert stat.S_IMODE((pki / f"{stem}.key").stat().st_mode) == 0o600


def test_renewing_who_is_named_or_due(pki: Path, fl: Any) -> None:
    """Others are left alone, and of 90 days none ends within 30."""
    before = {file.name: file.read_bytes() for file in pki.iterdir()}
    assert "nothing ends within 30 days" in fl("ca", "renew", "--within", "30").stdout
    assert {file.name: file.read_bytes() for file in pki.iterdir()} == before
    assert fl("ca", "renew", "client-edge-3", "--within", "91").exit_code == Exit.OK
    changed = {file.name for file in pki.iterdir() if file.read_bytes() != before[file.name]}
    assert changed == {"client-edge-3.crt", "client-edge-3.key"}


def test_another_authority_for_everybody(pki: Path, fl: Any, tmp_path: Path) -> None:
    """The old folder stays as it is; the new one has the same holders, issued by the new authority."""
    before = {file: file.read_bytes() for file in pki.iterdir()}
    fl("ca", "init", "--dir", "next", "--name", "Next CA")
    made = json.loads(fl("ca", "renew", "--dir", "next", "--from", "pki", "--json").stdout)
    assert len(made["renewed"]) == 3
    assert identities(tmp_path / "next") == identities(pki)
    leaf = x509.load_pem_x509_certificate((tmp_path / "next" / "client-edge-3.crt").read_bytes())
    assert leaf.issuer.rfc4514_string() == "CN=Next CA"
    assert {file: file.read_bytes() for file in pki.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["client-nobody"], "client-nobody.crt cannot be read: No such file"),
        (["ca"], "ca: expected a certificate with one URI fl://ROLE/NAME"),
        (["--from", "empty"], "there is no certificate in empty: `fl ca issue` makes one"),
        (["--days", "3651"], "the authority ends on"),
    ],
)
def test_what_cannot_be_renewed(pki: Path, fl: Any, arguments: list[str], words: str) -> None:
    """It exits with 2, says why, and every pair is as it was."""
    before = {file: file.read_bytes() for file in pki.iterdir()}
    result = fl("ca", "renew", *arguments)
    assert (result.exit_code, words in result.stderr) == (Exit.MISUSED, True), result.stderr
    assert {file: file.read_bytes() for file in pki.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["client", "edge 3"], "client name: expected 1 to 64"),
        (["admin", "../alice"], "admin name"),
        (["server", "--host", "a b"], "DNS name"),
        (["client", "x", "--days", "3651"], "the authority ends on"),
        (["client", "x", "--dir", "nowhere"], "`fl ca init --dir nowhere`"),
    ],
)
def test_refusals(pki: Path, fl: Any, arguments: list[str], words: str) -> None:
    """What cannot be issued exits with 2, says why and leaves no file."""
    before = set(pki.iterdir())
    result = fl("ca", "issue", *arguments)
    assert result.exit_code == Exit.MISUSED
    assert words in result.stderr
    assert set(pki.iterdir()) == before


def test_damaged_authority(pki: Path, fl: Any) -> None:
    """An authority whose files do not fit together is named."""
    (pki / "ca.key").write_bytes((pki / "client-edge-3.key").read_bytes())
    result = fl("ca", "issue", "client", "x")
    assert result.exit_code == Exit.MISUSED
    assert "are no authority: expected the certificate's own" in result.stderr


def test_json(pki: Path, fl: Any) -> None:
    """--json tells where the files are, for whom and until when."""
    facts = json.loads(fl("ca", "issue", "client", "edge-4", "--json").stdout)
    assert facts["names"] == ["fl://client/edge-4"]
    assert Path(facts["key"]).name == "client-edge-4.key"


def test_wrong_files_for_a_call(pki: Path, fl: Any) -> None:
    """A key that is not the certificate's is found before anything is sent."""
    files = ["--ca", pki / "ca.crt", "--cert", pki / "admin-alice.crt", "--key", pki / "ca.key"]
    result = fl("run", "list", *files)
    assert result.exit_code == Exit.MISUSED
    assert "own private key" in result.stderr


def test_folder_that_cannot_be_made(fl: Any, tmp_path: Path) -> None:
    """A file where the folder should be is named, without a traceback."""
    (tmp_path / "pki").write_text("a file")
    result = fl("ca", "init")
    assert (result.exit_code, "pki exists already" in result.stderr) == (Exit.MISUSED, True)


def test_full_disk(pki: Path, fl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full in mid-renewal, the old certificate and its key stay together."""
    before = {file: file.read_bytes() for file in pki.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    result = fl("ca", "issue", "client", "edge-3", "--force")
    assert (result.exit_code, "No space left" in result.stderr) == (Exit.REFUSED, True)
    assert {file: file.read_bytes() for file in pki.iterdir()} == before
