"""The change of an authority in a folder: its steps, and SIGKILL before every change of a file."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509

from fl_common.certificates.leaf import is_issuer
from fl_common.certificates.pem import PemFiles, PemWatcher
from fl_ops.certificates import pki
from fl_ops.certificates.rotation import Rotation, Stage
from fl_ops.errors import UsageError
from fl_server.enrollment.authority import Authority
from fl_server.settings.sections import EnrollmentConfig
from tests.marks import slow_except
from tests.processes.killed_daemon import kill_at

Step = Callable[[Path, str], object]
ROLES = ["", "client", "worker"]
ALL = ("Clinic CA", "Clinic CA clients", "Clinic CA workers")


def begin(folder: Path, role: str = "") -> None:
    """Trust both."""
    Rotation.of(folder, role).begin(3650)


def sign(folder: Path, role: str = "") -> list[str]:
    """Let the new one sign."""
    return Rotation.of(folder, role).sign()


def finish(folder: Path, role: str = "") -> None:
    """Drop the old one."""
    Rotation.of(folder, role).finish()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An authority, two for one role each, and certificates of a coordinator, a worker and an operator."""
    folder = tmp_path / "pki"
    pki.init(folder, "Clinic CA", 3650)
    pki.init_for_role(folder, "client", 3650)
    pki.init_for_role(folder, "worker", 3650)
    for role, name in (("server", "coordinator"), ("worker", "one"), ("admin", "alice")):
        hosts = ("127.0.0.1",) if role != "admin" else ()
        pki.issue(pki.LeafRequest(folder, role, name, 90, force=False, hosts=hosts))
    return folder


def names(path: Path) -> list[str]:
    """The common names of a bundle."""
    attributes = [
        leaf.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        for leaf in x509.load_pem_x509_certificates(path.read_bytes())
    ]
    return [str(of[0].value) for of in attributes]


def usable(folder: Path, role: str = "") -> x509.Certificate:
    """The authority that signs, read as a coordinator reads it. Fails if a certificate of the folder is not trusted."""
    stem = f"ca-{role}" if role else "ca"
    server = PemWatcher(
        PemFiles(folder / "server-coordinator.crt", folder / "server-coordinator.key", folder / pki.CLIENT_BUNDLE)
    )
    config = EnrollmentConfig(
        ca_cert=folder / f"{stem}.crt", ca_key=folder / f"{stem}.key", server_ca=folder / "ca.crt"
    )
    trusted = x509.load_pem_x509_certificates((folder / "ca.crt").read_bytes())
    for leaf in ("server-coordinator", "worker-one", "admin-alice"):
        read = PemFiles(folder / f"{leaf}.crt", folder / f"{leaf}.key", None).read()
        assert any(is_issuer(authority, read.leaf) for authority in trusted), leaf
    return Authority(config, server).certificate


@pytest.mark.parametrize("role", ROLES)
def test_the_steps_of_a_change(folder: Path, role: str) -> None:
    """Both are trusted from the first step to the last; the certificates in the folder follow the first authority."""
    stem, first = (f"ca-{role}", f"Clinic CA {role}s") if role else ("ca", "Clinic CA")
    old, serial = usable(folder, role), PemFiles(folder / "admin-alice.crt", folder / "admin-alice.key", None)
    before = serial.read()
    begin(folder, role)
    assert names(folder / f"{stem}.crt") == [first, f"{first} 2"]
    assert set(names(folder / pki.CLIENT_BUNDLE)) == {*ALL, f"{first} 2"}
    assert usable(folder, role) == old
    assert sign(folder, role) == ([] if role else ["admin-alice", "server-coordinator", "worker-one"])
    new = usable(folder, role)
    assert new != old
    assert Rotation.of(folder, role).stage is Stage.SIGNING
    finish(folder, role)
    assert names(folder / f"{stem}.crt") == [f"{first} 2"]
    assert f"{first} 2" in names(folder / pki.CLIENT_BUNDLE)
    assert first not in names(folder / pki.CLIENT_BUNDLE)
    assert usable(folder, role) == new
    after = serial.read()
    assert (before.key == after.key, before.leaf == after.leaf) == (True, bool(role))
    assert [path.name for path in folder.glob(f"{stem}-*") if role or path.stem not in {"ca-client", "ca-worker"}] == []
    assert new.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_the_new_authority_issues_and_renews(folder: Path) -> None:
    """`fl ca issue` and `fl ca renew` sign with the authority of the key: the old one first, then the new one."""
    old = usable(folder)
    begin(folder)
    early = pki.issue(pki.LeafRequest(folder, "viewer", "early", 90, force=False)).certificate
    assert is_issuer(old, early)
    sign(folder)
    late = pki.issue(pki.LeafRequest(folder, "viewer", "late", 90, force=False)).certificate
    renewed = pki.renew(folder, 90, holders=["viewer-early"])
    assert is_issuer(usable(folder), late)
    assert is_issuer(usable(folder), renewed[0].certificate)


def test_a_lost_key_of_the_new_authority_is_made_again(folder: Path) -> None:
    """Nothing depends on it before it signs. Signing without it is refused."""
    begin(folder)
    (folder / "ca-next.key").unlink()
    with pytest.raises(UsageError, match="`fl ca rotate` makes another one"):
        sign(folder)
    begin(folder)
    sign(folder)
    assert usable(folder)


def kills(step: Callable[[Path], object], folder: Path, tmp_path: Path) -> Iterator[Path]:
    """Copies of the folder, in each of which SIGKILL has ended the step before another change of a file."""
    number = 0
    while True:
        number += 1
        copy = Path(shutil.copytree(folder, tmp_path / f"killed-{number}"))
        child = os.fork()
        if child == 0:
            kill_at(number, str(copy))
            step(copy)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return
        assert os.WTERMSIG(status) == signal.SIGKILL
        yield copy


@pytest.mark.parametrize("role", slow_except(ROLES, ROLES[0]))
@pytest.mark.parametrize(("earlier", "step"), [((), begin), ((begin,), sign), ((begin, sign), finish)])
def test_a_kill_at_each_step_loses_nothing(
    folder: Path, tmp_path: Path, role: str, earlier: tuple[Step, ...], step: Step
) -> None:
    """A coordinator starts with what a kill has left, and the step does the rest when it is repeated."""
    for done in earlier:
        done(folder, role)
    count = 0
    for killed in kills(lambda copy: step(copy, role), folder, tmp_path):
        usable(killed, role)
        step(killed, role)
        rotation = Rotation.of(killed, role)
        assert rotation.stage is [Stage.TRUSTED, Stage.SIGNING, Stage.SINGLE][len(earlier)]
        assert rotation.left_over is False
        usable(killed, role)
        count += 1
    assert count >= 4
