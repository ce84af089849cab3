"""`fl ca` in a folder, and its certificates in a real mutual TLS handshake over gRPC."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from typer.testing import CliRunner

from fl_client.settings.config import load_config
from fl_client.settings.identity import identity_of
from fl_common.certificates.names import OPERATOR_ROLES, holder_of
from fl_common.certificates.pem import fingerprints
from fl_common.settings import read_settings
from fl_ops.admin import settings
from fl_ops.certificates import ca
from fl_ops.commands.cli import app
from fl_ops.errors import Exit
from fl_server.settings.config import ServerConfig
from protos.fl.v1 import admin_pb2
from tests.docs.pages import check_fl_command
from tests.fl_ops.conftest import FakeAdmin, Fl, Serve


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with a server, a client and an admin, made by the command."""
    folder = tmp_path_factory.mktemp("made") / "pki"
    hosts = ("--host", "localhost", "--host", "127.0.0.1")
    for arguments in (
        ["init"],
        ["issue", "server", *hosts],
        ["issue", "client", "edge-3"],
        ["issue", "admin", "alice"],
    ):
        assert CliRunner().invoke(app, ["ca", *arguments, "--dir", str(folder)]).exit_code == Exit.OK
    return folder


@pytest.fixture
def pki(made_once: Path, fl: Fl, tmp_path: Path) -> Path:
    """A copy of this authority in the folder of the test."""
    return Path(shutil.copytree(made_once, tmp_path / "pki"))


def test_a_service_gives_all_its_names(pki: Path, fl: Fl) -> None:
    """Those of the cluster's DNS, localhost for a port-forward, and the hosts, each once."""
    words = ("--service", "coordinator.lab", "--host", "localhost", "--host", "fl.example.org", "--force")
    done = fl("ca", "issue", "server", *words)
    assert done.exit_code == 0, done.stderr
    certificate = x509.load_pem_x509_certificate((pki / "server-coordinator.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    short = "coordinator.lab"
    hosts = ["coordinator", short, f"{short}.svc", f"{short}.svc.cluster.local", "fl.example.org", "localhost"]
    assert sorted(names.get_values_for_type(x509.DNSName)) == sorted(hosts)


def mutual(pki: Path) -> grpc.ServerCredentials:
    """A server that shows its certificate and requires one of the same authority."""
    pair = ((pki / "server-coordinator.key").read_bytes(), (pki / "server-coordinator.crt").read_bytes())
    return grpc.ssl_server_credentials([pair], (pki / "ca.crt").read_bytes(), require_client_auth=True)


def as_who(fake: Any, pki: Path, who: str) -> list[str]:
    """Arguments of a call to the fake with one's certificate."""
    files = {"--ca": pki / "ca.crt", "--cert": pki / f"{who}.crt", "--key": pki / f"{who}.key"}
    return ["--server", fake.address, *(str(part) for pair in files.items() for part in pair)]


@pytest.mark.parametrize(
    ("who", "uri"), [("admin-alice", b"fl://admin/alice"), ("client-edge-3", b"fl://client/edge-3")]
)
def test_handshake(serve: Serve, pki: Path, fl: Fl, who: str, uri: bytes) -> None:
    """The coordinator learns name and role of its caller from the handshake."""
    fake = serve(mutual(pki))
    fake.responses["ListRuns"] = admin_pb2.ListRunsResponse()
    assert fl("run", "list", *as_who(fake, pki, who)).exit_code == Exit.OK
    assert fake.identities == [[uri]]


def test_stranger(serve: Serve, pki: Path, fl: Fl, tmp_path: Path) -> None:
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


def test_plain_text_to_a_tls_port(serve: Serve, pki: Path, fl: Fl) -> None:
    """Plain text to a port that wants certificates fails and hints at them."""
    fake = serve(mutual(pki))
    result = fl("run", "list", "--insecure", "--server", fake.address)
    assert result.exit_code == Exit.UNREACHABLE
    assert "certificates" in result.stderr


def test_host_that_the_certificate_does_not_name(serve: Serve, fl: Fl, tmp_path: Path) -> None:
    """A server is not trusted under a host that is missing in its certificate, and the error gives this cause."""
    fl("ca", "init")
    fl("ca", "issue", "server", "--host", "fl.example.org")
    fl("ca", "issue", "admin", "alice")
    fake = serve(mutual(tmp_path / "pki"))
    result = fl("run", "list", *as_who(fake, tmp_path / "pki", "admin-alice"))
    assert result.exit_code == Exit.UNREACHABLE
    assert "is for other host names" in result.stderr
    assert fake.requests == []


def test_permissions(pki: Path) -> None:
    """Private keys are for their owner only, certificates for everybody, and nothing else is left in the folder."""
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in pki.iterdir()}
    stems = ("ca", "server-coordinator", "client-edge-3", "admin-alice")
    assert modes == {f"{stem}.{kind}": mode for stem in stems for kind, mode in (("key", 0o600), ("crt", 0o644))}


@pytest.mark.parametrize("arguments", [["init"], ["issue", "client", "edge-3"], ["issue", "client", "new"]])
def test_no_overwriting(pki: Path, fl: Fl, arguments: list[str]) -> None:
    """A key or certificate that is there is never written over unasked."""
    (pki / "client-new.key").write_text("precious")
    before = {file: file.read_bytes() for file in pki.iterdir()}
    result = fl("ca", *arguments)
    assert result.exit_code == Exit.MISUSED
    assert "not overwritten" in result.stderr
    assert {file: file.read_bytes() for file in pki.iterdir()} == before


def test_renewal(pki: Path, fl: Fl) -> None:
    """--force renews a leaf: another key, still private."""
    before = (pki / "client-edge-3.key").read_bytes()
    assert fl("ca", "issue", "client", "edge-3", "--force").exit_code == Exit.OK
    assert (pki / "client-edge-3.key").read_bytes() != before
    assert stat.S_IMODE((pki / "client-edge-3.key").stat().st_mode) == 0o600


def identities(folder: Path) -> dict[str, ca.Identity]:
    """Whom the certificates in a folder are for, but for the authority's."""
    leaves = (file for file in folder.glob("*.crt") if file.stem != "ca")
    return {file.stem: ca.identity_of(x509.load_pem_x509_certificate(file.read_bytes())) for file in leaves}


def test_renewing_all(pki: Path, fl: Fl) -> None:
    """Everybody has a new pair that fits together, is of the same holder with the same hosts, and is private."""
    holders, before = identities(pki), {file: file.read_bytes() for file in pki.iterdir()}
    assert fl("ca", "renew").exit_code == Exit.OK
    assert identities(pki) == holders
    assert holders["server-coordinator"].hosts == ("localhost", "127.0.0.1")
    assert {file.stem for file in pki.iterdir() if file.read_bytes() == before[file]} == {"ca"}
    for stem in holders:
        ca.load_pair((pki / f"{stem}.crt").read_bytes(), (pki / f"{stem}.key").read_bytes())
        assert stat.S_IMODE((pki / f"{stem}.key").stat().st_mode) == 0o600


def test_renewing_who_is_named_or_due(pki: Path, fl: Fl) -> None:
    """Others are left alone, and of 90 days none ends within 30."""
    before = {file.name: file.read_bytes() for file in pki.iterdir()}
    assert "no certificate ends within 30 days" in fl("ca", "renew", "--within", "30").stdout
    assert {file.name: file.read_bytes() for file in pki.iterdir()} == before
    assert fl("ca", "renew", "client-edge-3", "--within", "91").exit_code == Exit.OK
    changed = {file.name for file in pki.iterdir() if file.read_bytes() != before[file.name]}
    assert changed == {"client-edge-3.crt", "client-edge-3.key"}


def test_another_authority_for_everybody(pki: Path, fl: Fl, tmp_path: Path) -> None:
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
    ("arguments", "expected"),
    [
        (["client-unknown"], "client-unknown.crt cannot be read: No such file"),
        (["ca"], "ca: expected a certificate with one URI fl://ROLE/NAME"),
        (["--from", "empty"], "there is no certificate in empty: `fl ca issue` makes one"),
        (["--days", "3651"], "the authority ends on"),
    ],
)
def test_what_cannot_be_renewed(pki: Path, fl: Fl, arguments: list[str], expected: str) -> None:
    """It exits with 2 and the reason, and every pair is unchanged."""
    before = {file: file.read_bytes() for file in pki.iterdir()}
    result = fl("ca", "renew", *arguments)
    assert (result.exit_code, expected in result.stderr) == (Exit.MISUSED, True), result.stderr
    assert {file: file.read_bytes() for file in pki.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["client", "edge 3"], "client name: expected 1 to 64"),
        (["admin", "../alice"], "admin name"),
        (["server", "--host", "a b"], "DNS name"),
        (["server", "--service", "fl-server"], "expected NAME.NAMESPACE"),
        (["server"], "expected --host or --service"),
        (["client", "x", "--days", "3651"], "the authority ends on"),
        (["client", "x", "--dir", "nowhere"], "`fl ca init --dir nowhere`"),
    ],
)
def test_refusals(pki: Path, fl: Fl, arguments: list[str], expected: str) -> None:
    """It exits with 2 and the reason, and leaves no file."""
    before = set(pki.iterdir())
    result = fl("ca", "issue", *arguments)
    assert result.exit_code == Exit.MISUSED
    assert expected in result.stderr
    assert set(pki.iterdir()) == before


def test_damaged_authority(pki: Path, fl: Fl) -> None:
    """An authority with inconsistent files is named."""
    (pki / "ca.key").write_bytes((pki / "client-edge-3.key").read_bytes())
    result = fl("ca", "issue", "client", "x")
    assert result.exit_code == Exit.MISUSED
    assert "are no authority: expected the certificate's own" in result.stderr


def test_json(pki: Path, fl: Fl) -> None:
    """--json has files, names and end of validity."""
    facts = json.loads(fl("ca", "issue", "client", "edge-4", "--json").stdout)
    assert facts["names"] == ["fl://client/edge-4"]
    assert Path(facts["key"]).name == "client-edge-4.key"


def test_wrong_files_for_a_call(pki: Path, fl: Fl) -> None:
    """A key that is not the certificate's is found before anything is sent."""
    files = ["--ca", pki / "ca.crt", "--cert", pki / "admin-alice.crt", "--key", pki / "ca.key"]
    result = fl("run", "list", *files)
    assert result.exit_code == Exit.MISUSED
    assert "own private key" in result.stderr


def test_folder_that_cannot_be_made(fl: Fl, tmp_path: Path) -> None:
    """A file where the folder should be is named, without a traceback."""
    (tmp_path / "pki").write_text("a file")
    result = fl("ca", "init")
    assert (result.exit_code, "pki exists already" in result.stderr) == (Exit.MISUSED, True)


def test_full_disk(pki: Path, fl: Fl, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full in mid-renewal, the old certificate and its key stay together."""
    before = {file: file.read_bytes() for file in pki.iterdir()}

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    result = fl("ca", "issue", "client", "edge-3", "--force")
    assert (result.exit_code, "No space left" in result.stderr) == (Exit.REFUSED, True)
    assert {file: file.read_bytes() for file in pki.iterdir()} == before


def printed_section(text: str) -> str:
    """The lines of TOML at the end of what `fl ca issue` prints."""
    return text[text.rindex("\n\n") :].strip() + "\n"


def test_the_section_for_a_server_is_loaded(fl: Fl, tmp_path: Path) -> None:
    """The printed lines are a whole [tls] section: the coordinator reads it, and accepts callers of the authority."""
    fl("ca", "init")
    section = printed_section(fl("ca", "issue", "server", "--host", "127.0.0.1").stdout)
    path = tmp_path / "elsewhere" / "server.toml"
    path.parent.mkdir()
    path.write_text(f'state_dir = "state"\n{section}')
    tls = read_settings(path, ServerConfig).tls
    assert tls is not None
    assert (tls.cert, tls.key, tls.client_ca) == (
        tmp_path / "pki/server-coordinator.crt", tmp_path / "pki/server-coordinator.key", tmp_path / "pki/ca.crt",
    )  # fmt: skip


def test_the_section_for_a_device_is_loaded(fl: Fl, tmp_path: Path) -> None:
    """As for the server; the daemon takes its identity from the certificate."""
    fl("ca", "init")
    section = printed_section(fl("ca", "issue", "client", "edge-3").stdout)
    path = tmp_path / "elsewhere" / "client.toml"
    path.parent.mkdir()
    path.write_text(f'server = "fl.example.org:7070"\nstate_dir = "state"\n{section}[task]\nname = "digits"\n')
    config = load_config(path)
    assert config.tls is not None
    assert config.tls.ca == tmp_path / "pki/ca.crt"
    assert identity_of(config) == "edge-3"


@pytest.mark.parametrize("role", OPERATOR_ROLES)
def test_the_lines_for_an_operator_are_loaded(fl: Fl, tmp_path: Path, role: str) -> None:
    """Every operator's role: the printed command has the options of `fl`, and the printed lines are its settings."""
    fl("ca", "init")
    text = fl("ca", "issue", role, "alice").stdout
    command = next(line for line in text.splitlines() if line.startswith("fl whoami"))
    check_fl_command(command.split()[1:])
    path = tmp_path / "fl.toml"
    path.write_text(printed_section(text))
    certificates = settings.resolve([settings.from_file(path)]).security
    stem = tmp_path / "pki" / f"{role}-alice"
    assert certificates == settings.Certificates(
        tmp_path / "pki/ca.crt", stem.with_suffix(".crt"), stem.with_suffix(".key")
    )
    holder = holder_of(x509.load_pem_x509_certificate(stem.with_suffix(".crt").read_bytes()))
    assert (holder.role, holder.name) == (role, "alice")
    assert f"in {tmp_path / 'config/impetus/fl.toml'}:" in text


def known(*authorities: admin_pb2.Authority) -> admin_pb2.ListAuthoritiesResponse:
    """The coordinator's answer."""
    return admin_pb2.ListAuthoritiesResponse(authorities=authorities, clients=12)


def digests(pki: Path) -> list[str]:
    """The fingerprints in the authority's file: the old one's first."""
    return fingerprints((pki / "ca.crt").read_bytes())


@pytest.fixture
def half_way(pki: Path, fl: Fl) -> Path:
    """A folder in which both authorities are trusted."""
    assert fl("ca", "rotate").exit_code == 0
    return pki


def test_a_step_waits_for_the_devices_that_lack_the_new_authority(admin: FakeAdmin, fl: Fl, half_way: Path) -> None:
    """The command refuses with their number and first names, and signs nothing. --force goes on."""
    lacking = admin_pb2.Authority(
        fingerprint=digests(half_way)[1], accepted=True, given=True, strangers=12, stranger_names=["a", "b"]
    )
    admin.responses["ListAuthorities"] = known(lacking)
    before = (half_way / "ca.key").read_bytes()
    refused = fl("ca", "rotate")
    assert refused.exit_code == Exit.REFUSED
    assert "12 devices (a, b and 10 more) without trust in the new authority" in refused.stderr
    assert (half_way / "ca.key").read_bytes() == before
    assert fl("ca", "rotate", "--finish").exit_code == Exit.MISUSED
    forced = json.loads(fl("ca", "rotate", "--force", "--json").stdout)
    again = ["admin-alice", "client-edge-3", "server-coordinator"]
    assert (forced["stage"], forced["signed_again"]) == ("signing", again)


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ({"dependents": 1, "dependent_names": ["edge-7"]}, "1 device (edge-7) with need of the old authority"),
        ({"signed_coordinator": True}, "still shows a certificate of the old authority"),
        ({"signs": True}, "still signs devices with the old authority"),
    ],
)
def test_the_old_authority_is_kept_while_it_is_needed(
    admin: FakeAdmin, fl: Fl, half_way: Path, old: dict[str, Any], message: str
) -> None:
    """By a device or by the coordinator itself. Then it is dropped, once."""
    first, second = digests(half_way)
    admin.responses["ListAuthorities"] = known(admin_pb2.Authority(fingerprint=second, accepted=True, given=True))
    assert fl("ca", "rotate").exit_code == 0
    admin.responses["ListAuthorities"] = known(admin_pb2.Authority(fingerprint=first, **old))
    refused = fl("ca", "rotate", "--finish")
    assert (refused.exit_code, message in refused.stderr) == (Exit.REFUSED, True), refused.stderr
    assert digests(half_way) == [first, second]
    admin.responses["ListAuthorities"] = known(admin_pb2.Authority(fingerprint=first))
    assert fl("ca", "rotate", "--finish").exit_code == 0
    assert digests(half_way) == [second]
    assert fl("ca", "rotate", "--finish").exit_code == Exit.MISUSED


def test_the_coordinator_has_to_know_the_new_authority(admin: FakeAdmin, fl: Fl, half_way: Path) -> None:
    """Before that nothing is signed with it."""
    admin.responses["ListAuthorities"] = known(admin_pb2.Authority(fingerprint=digests(half_way)[0], accepted=True))
    refused = fl("ca", "rotate")
    assert (refused.exit_code, "tls.client_ca, enrollment.ca_cert" in refused.stderr) == (Exit.REFUSED, True)


def test_the_list_of_authorities(admin: FakeAdmin, fl: Fl) -> None:
    """What each one signs, and how many devices need it or lack it."""
    admin.responses["ListAuthorities"] = known(
        admin_pb2.Authority(name="Clinic CA", signed_coordinator=True, given=True, holders=5, dependents=7),
        admin_pb2.Authority(name="Clinic CA 2", signs=True, given=True, holders=7, strangers=3),
    )
    shown = fl("ca", "status").stdout
    assert "this coordinator" in shown
    assert "12 devices with a certificate that can be used or renewed" in shown
