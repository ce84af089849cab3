"""`fl-client init` with a token: the key stays here, a repeat loses nothing, and every refusal has a remedy."""

from __future__ import annotations

import io
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fl_client.__main__ import main
from fl_client.enrollment import folder as folders
from fl_client.settings.config import load_config
from fl_client.settings.identity import identity_of
from fl_common.certificates.pem import PemFiles
from tests.fl_client.enrollment.fake_authority import FakeAuthority, files_below, fingerprint
from tests.processes.certificates import Pki

TOKEN = "t1.planted-secret"
Init = Callable[..., int]


class Killed(BaseException):
    """The process ends here."""


def killed(*_: object) -> Any:
    """In place of a step."""
    raise Killed


def hours_ago(hours: float) -> datetime:
    """A time in the past."""
    return datetime.now(UTC) - timedelta(hours=hours)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """The coordinator's authority."""
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def authority(pki: Pki) -> Iterator[FakeAuthority]:
    """A coordinator's port for enrollment."""
    with FakeAuthority(pki) as running:
        yield running


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Where init writes; the state directory is beside it."""
    return tmp_path / "client.toml"


@pytest.fixture
def init(config: Path, authority: FakeAuthority, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> Init:
    """Runs init against the authority, with more flags; gives its exit code."""
    monkeypatch.setenv("FL_ENROLL_TOKEN", TOKEN)

    def run(*flags: str, pin: str = fingerprint(pki), enroll: str | None = None) -> int:
        where = ["--config", str(config), "--server", "127.0.0.1", "--enroll-server", enroll or authority.address]
        return main(["init", *where, "--ca-fingerprint", pin, "--task", "digits", "--yes", "--no-doctor", *flags])

    return run


def test_a_device_gets_its_certificate(init: Init, config: Path, authority: FakeAuthority) -> None:
    """The settings work, the pair belongs together, the key is private, and no message had the key."""
    authority.labels = {"site": "north"}
    assert init("--label", "floor=2") == 0
    settings = load_config(config)
    assert identity_of(settings) == "edge-7"
    assert (settings.server, settings.labels) == ("127.0.0.1:7070", {"site": "north", "floor": "2"})
    assert settings.tls is not None
    assert (settings.tls.renew, settings.tls.enroll_server) == (True, authority.address)
    pem = PemFiles(settings.tls.cert, settings.tls.key, settings.tls.ca).read()
    assert stat.S_IMODE(settings.tls.key.stat().st_mode) == 0o600
    (request,) = authority.calls["Enroll"]
    assert (request.token, request.name) == (TOKEN, "")
    assert x509.load_der_x509_csr(request.csr).public_key() == load_pem_private_key(pem.key, None).public_key()
    assert sorted(path.name for path in settings.tls.folder.iterdir()) == [
        "current",
        f"issued-{pem.leaf.serial_number:x}",
    ]


@pytest.mark.parametrize("source", ["flag", "file", "stdin"])
def test_the_token_may_come_from(
    source: str, init: Init, tmp_path: Path, authority: FakeAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag, a file or standard input, and each of them instead of the variable. Line ends are not part of it."""
    (tmp_path / "token").write_text("t2.other\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("t2.other\n"))
    flags = {"flag": ("--token", "t2.other"), "file": ("--token-file", str(tmp_path / "token"))}
    assert init(*flags.get(source, ("--token-file", "-"))) == 0
    assert authority.calls["Enroll"][0].token == "t2.other"


@pytest.mark.parametrize(
    ("lines", "name", "token"),
    [
        ("name,token\nedge-7,t7.a\n", None, "t7.a"),
        ("name,token\nedge-6,t6.a\nedge-7,t7.a\n", "edge-7", "t7.a"),
        ("gpu-*,t8.a\n", None, "t8.a"),
        ("name,token\ngpu-*,t6.a\nedge-*,t8.a\n", "edge-7", "t8.a"),
    ],
)
def test_the_lines_of_fl_enroll_create_are_a_token_file(
    lines: str, name: str | None, token: str, init: Init, tmp_path: Path, authority: FakeAuthority
) -> None:
    """The device's own line is used."""
    (tmp_path / "tokens.csv").write_text(lines)
    assert init("--token-file", str(tmp_path / "tokens.csv"), *(["--client-id", name] if name else [])) == 0
    assert authority.calls["Enroll"][0].token == token


def test_a_missing_authority_is_named_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], authority: FakeAuthority
) -> None:
    """As in a pod whose Secret is missing: the message names the file, and asks for no fingerprint in its place."""
    where = ("--server", "127.0.0.1:1", "--enroll-server", f"127.0.0.1:{authority.port}", "--client-id", "edge-7")
    files = ("--ca", str(tmp_path / "ca.crt"), "--token-file", str(tmp_path / "token"))
    assert main(["init", "--only-certificate", *where, *files, "--state-dir", str(tmp_path / "state")]) == 2
    assert f"expected the authority's certificate at {tmp_path / 'ca.crt'}" in capsys.readouterr().err


def test_a_repeat_after_a_lost_answer_gets_the_same_certificate(
    init: Init, config: Path, authority: FakeAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key was on the disk before the call. The repeat sends the same request, and the token is not lost."""
    with monkeypatch.context() as patch:
        patch.setattr(folders.CertificateFolder, "prepare", killed)
        with pytest.raises(Killed):
            init()
    assert not config.exists()
    assert init() == 0
    first, second = authority.calls["Enroll"]
    assert first == second
    assert not (config.parent / "state" / "tls" / "pending").exists()


def test_a_repeat_after_the_certificate_writes_the_settings(
    init: Init, config: Path, authority: FakeAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between certificate and settings: the repeat gets the same certificate again, and the labels."""
    authority.labels = {"site": "north"}
    with monkeypatch.context() as patch:
        patch.setattr("fl_client.setup.enrolling.save", killed)
        with pytest.raises(Killed):
            init()
    before = files_below(config.parent / "state" / "tls" / "current")
    assert init() == 0
    assert files_below(config.parent / "state" / "tls" / "current") == before
    assert load_config(config).labels == {"site": "north"}


def test_a_repeat_of_a_finished_command_does_nothing(
    init: Init, config: Path, authority: FakeAuthority, capsys: pytest.CaptureFixture[str]
) -> None:
    """A valid certificate is kept, and no token is spent."""
    assert init() == 0
    before = files_below(config.parent)
    assert init() == 0
    assert "edge-7 has a valid certificate" in capsys.readouterr().out
    assert (files_below(config.parent), len(authority.calls["Enroll"])) == (before, 1)


def test_an_ended_certificate_is_replaced_and_the_settings_are_kept(
    init: Init, config: Path, authority: FakeAuthority
) -> None:
    """A device that was off for too long: a new key, the same name, and the owner's own changes of the settings."""
    authority.life = timedelta(minutes=-1)
    assert init() == 2
    authority.life = timedelta(hours=1)
    authority.answers.clear()
    assert init() == 0
    config.write_text(config.read_text() + "\n# the owner's\n")
    serial = (config.parent / "state" / "tls" / "current").readlink()
    leaf = config.parent / "state" / "tls" / "current" / "tls.crt"
    ended = authority.pki.forge(
        "ended", [x509.UniformResourceIdentifier("fl://client/edge-7")], ends=hours_ago(1), starts=hours_ago(2)
    )
    leaf.write_bytes(ended.cert.read_bytes())
    assert init() == 0
    assert (config.parent / "state" / "tls" / "current").readlink() != serial
    assert config.read_text().endswith("# the owner's\n")


def test_only_the_certificate(init: Init, config: Path, authority: FakeAuthority, tmp_path: Path) -> None:
    """For settings from elsewhere: the files alone are written, under the requested name."""
    authority.name = "gpu-3"
    flags = ("--only-certificate", "--state-dir", str(tmp_path / "own"), "--client-id", "gpu-3")
    assert init(*flags) == 0
    assert init(*flags) == 0
    assert not config.exists()
    (request,) = authority.calls["Enroll"]
    assert request.name == "gpu-3"
    assert sorted(files_below(tmp_path / "own" / "tls" / "current")) == ["ca.crt", "renewal.json", "tls.crt", "tls.key"]


# Refusals. Nothing is written but the pending key.


def refused(init: Init, capsys: pytest.CaptureFixture[str], *flags: str, **changes: str) -> str:
    """The error of an init that fails. The token is in no output."""
    assert init(*flags, **changes) == 2
    output = capsys.readouterr()
    assert TOKEN not in output.out + output.err
    return output.err


def test_a_wrong_fingerprint_shows_what_came(
    init: Init, authority: FakeAuthority, pki: Pki, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fingerprints of the chain are shown, and the token was not sent."""
    error = refused(init, capsys, pin="ab" * 32)
    assert fingerprint(pki).replace(":", "").lower() in error
    assert "Nothing was sent to it" in error
    assert authority.calls["Enroll"] == []


def test_the_fingerprint_of_a_leaf_is_refused(
    init: Init, authority: FakeAuthority, pki: Pki, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pinned certificate must be an authority's: a leaf is renewed soon."""
    leaf = x509.load_pem_x509_certificate((pki.folder / "server-coordinator.crt").read_bytes())
    assert "may not sign others" in refused(init, capsys, pin=leaf.fingerprint(hashes.SHA256()).hex())
    assert authority.calls["Enroll"] == []


def test_a_coordinator_of_another_authority_with_the_right_chain_is_refused(
    init: Init, pki: Pki, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Someone in between presents the pinned authority behind a certificate of its own. The token is not sent."""
    foreign = Pki(tmp_path / "foreign", "Foreign")
    foreign.ca.write_bytes(foreign.ca.read_bytes() + pki.ca.read_bytes())
    with FakeAuthority(foreign) as impostor:
        error = refused(init, capsys, enroll=impostor.address)
        assert "not signed by" in error
        assert impostor.calls["Enroll"] == []


def test_a_downgrade_to_tls_1_2_is_refused(init: Init, pki: Pki, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that speaks TLS 1.2 only gets nothing."""
    files = pki.issue("server", "old")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connected, _ = listener.accept()
            with pytest.raises((ssl.SSLError, OSError)), context.wrap_socket(connected, server_side=True):
                pass

        thread = threading.Thread(target=serve)
        thread.start()
        error = refused(init, capsys, enroll=f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()
    assert "expected a TLS 1.3 handshake" in error


def test_an_address_without_a_server_is_named(
    init: Init, unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has the address, and the setting of the coordinator to look at."""
    error = refused(init, capsys, enroll=f"127.0.0.1:{unused_tcp_port}")
    assert f"127.0.0.1:{unused_tcp_port} cannot be reached: Connection refused" in error
    assert "enroll_listen" in error


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, "the token t1 has been used"),
        (grpc.StatusCode.UNAUTHENTICATED, "the token is unknown"),
        (grpc.StatusCode.FAILED_PRECONDITION, "the token t1 ended on 2026-11-01"),
    ],
)
def test_a_refused_token_has_the_reason_and_the_remedy(
    code: grpc.StatusCode, text: str, init: Init, authority: FakeAuthority, config: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The coordinator's words, and how to get another token."""
    authority.faults.append((code, text))
    error = refused(init, capsys)
    assert text in error
    assert "fl enroll create" in error
    assert not config.exists()


def test_a_certificate_of_another_name_is_not_used(
    init: Init, authority: FakeAuthority, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token for another device must not take over this one's state: the files in use stay."""
    assert init() == 0
    authority.name = "edge-8"
    before = files_below(config.parent / "state" / "tls" / "current")
    error = refused(init, capsys, "--force")
    assert "expected a token for 'edge-7'" in error
    assert files_below(config.parent / "state" / "tls" / "current") == before


def test_a_certificate_of_the_future_names_the_clock(
    init: Init, authority: FakeAuthority, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device's clock is slow. A repeat with the right time gets the same certificate."""
    authority.begins = timedelta(hours=1)
    assert "set the clock" in refused(init, capsys)


def test_a_certificate_that_begins_in_a_moment_is_waited_for(init: Init, authority: FakeAuthority) -> None:
    """After a revocation the next certificate of a name begins a second later."""
    authority.begins = timedelta(seconds=2)
    assert init() == 0


def test_bad_settings_spend_no_token(init: Init, authority: FakeAuthority, capsys: pytest.CaptureFixture[str]) -> None:
    """All flags are checked before the call."""
    assert "device" in refused(init, capsys, "--device", "abacus")
    assert "expected the SHA-256 of the authority's certificate" in refused(init, capsys, pin="12:34")
    assert authority.calls["Enroll"] == []


def test_several_tokens_need_a_name(init: Init, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No token is chosen for the owner."""
    (tmp_path / "tokens.csv").write_text("edge-6,t6.a\nedge-7,t7.a\n")
    assert "expected one token, got several" in refused(init, capsys, "--token-file", str(tmp_path / "tokens.csv"))


def test_an_answer_without_the_pinned_authority_is_refused(
    init: Init, authority: FakeAuthority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device would trust another authority than the one that its owner compared."""
    authority.authority = Pki(tmp_path / "other").ca.read_bytes()
    assert "expected the authority with the fingerprint" in refused(init, capsys)
