"""A real `fl-client init` and real daemons against a real coordinator: tokens, refusals, expiry, revocation."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import grpc
import pytest

from fl_client.enrollment import folder as folders
from fl_client.enrollment.folder import CertificateFolder
from fl_client.settings.config import load_config
from fl_client.setup.doctor import coordinator
from protos.fl.v1 import admin_pb2, admin_pb2_grpc
from tests.processes.certificates import Pki, credentials
from tests.processes.enrolling import enrolled_daemon, renewed, samples
from tests.processes.enrollment import EnrollingCoordinator
from tests.processes.federation import Daemon
from tests.processes.process import ROOT, TIMEOUT_S, Process, Workspace, eventually, write_toml

TASK = ["--task", "tiny_task:Tiny", "--yes", "--no-doctor"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnrollingCoordinator]:
    """A coordinator whose certificates live for a quarter of a minute, and prove a name for an hour after that."""
    with Workspace(tmp_path_factory.mktemp("enrolling")) as workspace:
        pki = Pki(workspace.folder / "pki")
        section: dict[str, Any] = {"lifetime_s": 15.0, "expired_grace_s": 3600.0, "renewals_per_min": 600.0}
        yield EnrollingCoordinator(workspace, pki, **section).serve()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A device's state directory."""
    return tmp_path / "state"


def serial(state: Path) -> int | None:
    """Of the certificate in use."""
    leaf = CertificateFolder(state / "tls").certificate()
    return None if leaf is None else leaf.serial_number


def revoke(server: EnrollingCoordinator, name: str) -> None:
    """Deny every certificate of a client."""
    request = admin_pb2.RevokeCertificatesRequest(name=name, reason="stolen")
    with grpc.secure_channel(str(server.settings["admin_listen"]), credentials(server._alice)) as channel:
        admin_pb2_grpc.AdminStub(channel).RevokeCertificates(request, timeout=TIMEOUT_S)


def test_a_daemon_works_with_what_init_wrote(server: EnrollingCoordinator, workspace: Workspace) -> None:
    """Settings from one command with a token: the daemon attends, with the token's labels."""
    config = workspace.folder / "edge-1.toml"
    token = server.create_token("edge-1", uses=1, labels={"site": "north"})
    assert server.init(token, "--config", str(config), "--state-dir", str(workspace.folder / "state"), *TASK) == 0
    tls = load_config(config).tls
    assert tls is not None
    assert tls.renew
    Process(workspace, "edge-1", "fl_client").start()
    server.until_present("edge-1")
    assert server.client("edge-1").labels == {"site": "north"}


class Killed(BaseException):
    """The process ends here."""


def test_a_repeat_gets_the_same_certificate(
    server: EnrollingCoordinator, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ends after the answer and before the files: its token is used, and still works for this device."""

    def killed(*_: object) -> Any:
        raise Killed

    token = server.create_token("edge-2")
    with monkeypatch.context() as patch:
        patch.setattr(folders.CertificateFolder, "prepare", killed)
        with pytest.raises(Killed):
            server.enroll("edge-2", token, state)
    issued = server.logged("certificate_issued", client="edge-2")["serial"]
    assert server.enroll("edge-2", token, state) == 0
    assert f"{serial(state):x}" == issued


@pytest.mark.parametrize("case", ["used", "other name", "unknown", "expired", "wrong fingerprint"])
def test_a_token_that_does_not_fit_gives_nothing(
    case: str, server: EnrollingCoordinator, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each refusal has its reason and what to do, and no certificate is written. The secret is in no output."""
    name = f"edge-{case.replace(' ', '-')}"
    more: tuple[str, ...] = ()
    token, words = server.create_token(name), {
        "used": "a token with a use left", "other name": f"the token's name '{name}'", "unknown": "a token of this",
        "expired": "a token that has not expired", "wrong fingerprint": "Nothing was sent to it",
    }[case]  # fmt: skip
    if case == "used":
        assert server.enroll(name, token, state.with_name("first")) == 0
    if case == "unknown":
        token = f"{'0' * 16}.{token.partition('.')[2]}"
    if case == "expired":
        token = server.create_token(name, ttl_s=0.001)
    if case == "wrong fingerprint":
        more = ("--ca-fingerprint", "ab" * 32)
    capsys.readouterr()
    assert server.enroll("edge-x" if case == "other name" else name, token, state, *more) == 2
    output = capsys.readouterr()
    assert words in output.err
    assert token.partition(".")[2] not in output.out + output.err
    assert serial(state) is None


@pytest.mark.slow
def test_a_daemon_that_was_off_for_too_long_comes_back_by_itself(
    server: EnrollingCoordinator, workspace: Workspace
) -> None:
    """It proves that it has the expired certificate's key, and attends with a new certificate."""
    daemon = enrolled_daemon(server, workspace, "edge-3")
    leaf = CertificateFolder(Path(daemon.settings["state_dir"]) / "tls").certificate()
    assert leaf is not None
    eventually(lambda: time.time() > leaf.not_valid_after_utc.timestamp(), "the certificate has ended")
    daemon.start()
    server.until_present("edge-3")
    issued = [line["rpc"] for line in server.events("certificate_issued", client="edge-3")]
    assert issued[:2] == ["Enroll", "Reenroll"]


@pytest.mark.slow
def test_a_revoked_device_stops_asking_until_it_has_a_new_token(
    server: EnrollingCoordinator, workspace: Workspace
) -> None:
    """Its connection ends, and it is not ready. A new token and key bring it back without a restart."""
    metrics = free_address()
    daemon = enrolled_daemon(server, workspace, "edge-4", metrics_listen=metrics).start()
    server.until_present("edge-4")
    assert readiness(metrics) == 200
    revoke(server, "edge-4")
    assert "revoked" in daemon.logged("refused")["reason"]
    eventually(lambda: readiness(metrics) == 503, "it is not ready")
    assert samples(metrics, "fl_client_refused") == {(): 1.0}
    state = Path(daemon.settings["state_dir"])
    key = (state / "tls" / "current" / "tls.key").read_bytes()
    assert server.enroll("edge-4", server.create_token("edge-4"), state) == 0
    assert (state / "tls" / "current" / "tls.key").read_bytes() != key
    daemon.logged("registered", 2)
    eventually(lambda: readiness(metrics) == 200, "it is ready")
    assert len(daemon.events("starting")) == 1


@pytest.mark.slow
def test_a_new_token_in_the_file_brings_a_revoked_device_back(
    server: EnrollingCoordinator, workspace: Workspace
) -> None:
    """`fl-client init --follow-token` beside the daemon, as in a pod: no restart, and no token for an accepted one."""
    daemon = enrolled_daemon(server, workspace, "edge-8").start()
    server.until_present("edge-8")
    token, errors = workspace.folder / "token", workspace.folder / "following.err"
    flags = ["--server", server.address, "--enroll-server", server.enroll_address, "--client-id", "edge-8"]
    flags += ["--state-dir", daemon.settings["state_dir"], "--ca", str(server.pki.ca), "--token-file", str(token)]
    command = [sys.executable, "-P", "-m", "fl_client", "init", "--only-certificate", "--follow-token", *flags]
    with (
        errors.open("w") as err,
        subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=err, stderr=err) as following,
    ):
        try:
            unused = server.create_token("edge-8")
            token.write_text(unused)
            revoke(server, "edge-8")
            daemon.logged("refused")
            # Older than the revocation, if it was read after it; not needed, if it was read before.
            token.write_text(server.create_token("edge-8"))
            daemon.logged("registered", 2)
            server.until_present("edge-8")
        finally:
            following.terminate()
        assert following.wait(TIMEOUT_S) == 0
    assert len(daemon.events("starting")) == 1
    assert unused.partition(".")[2] not in errors.read_text()


def free_address() -> str:
    """An address of this machine that nothing uses."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


def readiness(address: str) -> int:
    """The status that a probe gets."""
    try:
        with urllib.request.urlopen(f"http://{address}/ready", timeout=60) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def test_init_uses_a_token_only_if_the_certificate_is_revoked(
    server: EnrollingCoordinator, state: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As an init container does: nothing to do while the coordinator accepts it; the doctor says revoked."""
    token = server.create_token("edge-6")
    assert server.enroll("edge-6", token, state) == 0
    first = serial(state)
    again = server.create_token("edge-6")
    assert server.enroll("edge-6", again, state) == 0
    assert "nothing to do" in capsys.readouterr().out
    revoke(server, "edge-6")
    settings = {"server": server.address, "state_dir": str(state), "tls": renewed(server, state), "task": {"name": "x"}}
    write_toml(tmp_path / "client.toml", settings)
    [finding] = coordinator.check(load_config(tmp_path / "client.toml"))
    assert "the certificate is revoked" in finding.message
    assert "fl enroll create" in finding.fix
    assert server.enroll("edge-6", token, state) == 2
    assert "revoked" in capsys.readouterr().err
    assert serial(state) == first
    assert server.enroll("edge-6", server.create_token("edge-6"), state) == 0
    assert serial(state) != first


def test_init_keeps_a_valid_certificate_while_the_coordinator_is_down(
    server: EnrollingCoordinator, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device must start without it; the message says that nobody was asked."""
    token = server.create_token("edge-7")
    assert server.enroll("edge-7", token, state) == 0
    first = serial(state)
    assert server.enroll("edge-7", token, state, "--server", free_address()) == 0
    output = capsys.readouterr()
    assert "was not asked whether it accepts edge-7" in output.err
    assert "nothing to do" in output.out
    assert serial(state) == first


def test_a_daemon_with_files_of_its_owner_changes_none(server: EnrollingCoordinator, workspace: Workspace) -> None:
    """Without `renew` the files stay as they are, although the coordinator would renew them."""
    files = server.pki.issue("client", "edge-5")
    tls = {"ca": str(files.ca), "cert": str(files.cert), "key": str(files.key)}
    before = [path.read_bytes() for path in (files.cert, files.key)]
    daemon = Daemon(workspace, server, "edge-5", insecure=False, tls=tls).start()
    server.until_present("edge-5")
    assert daemon.terminate() == 0
    assert [path.read_bytes() for path in (files.cert, files.key)] == before
    assert server.events("certificate_issued", client="edge-5") == []
