"""The folder of the certificate: a process that is killed at any step leaves a pair that belongs together."""

from __future__ import annotations

import os
import shutil
import stat
import time
from datetime import timedelta
from pathlib import Path

import pytest

from fl_client.enrollment.folder import CertificateFolder, Issued, checked, new_request
from fl_common.certificates.pem import PemFiles
from tests.fl_client.enrollment.fake_authority import FakeAuthority, files_below
from tests.processes.certificates import Pki
from tests.processes.killed_daemon import kill_at


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> FakeAuthority:
    """Signs without a network."""
    return FakeAuthority(Pki(tmp_path_factory.mktemp("pki")))


@pytest.fixture
def folder(tmp_path: Path) -> CertificateFolder:
    """A folder without a certificate."""
    return CertificateFolder(tmp_path / "tls")


def issue(authority: FakeAuthority) -> Issued:
    """A new key and its certificate."""
    request = new_request()
    return checked(authority.issued(request.csr), request.key)


def serial_in(folder: CertificateFolder) -> str:
    """Serial of the certificate in use. Fails unless key, certificate and authority are whole and belong together."""
    files = folder.files()
    return f"{PemFiles(files['cert'], files['key'], files['ca']).read().leaf.serial_number:x}"


def killed_at(step: int, folder: CertificateFolder, issued: Issued) -> bool:
    """Install in a process of its own that SIGKILL ends before its nth change of a file. False if it has fewer."""
    if (child := os.fork()) == 0:
        kill_at(step, str(folder.path))
        try:
            folder.install(issued)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_a_kill_at_any_step_leaves_a_usable_pair(folder: CertificateFolder, authority: FakeAuthority) -> None:
    """Before the link changes it is the old pair, and from then on the new one. The next install succeeds."""
    old, new = issue(authority), issue(authority)
    folder.install(old)
    seen, step = [], 1
    while killed_at(step, folder, new):
        seen.append(serial_in(folder))
        folder.install(new)
        assert serial_in(folder) == new.serial
        shutil.rmtree(folder.path)
        folder.install(old)
        step += 1
    assert serial_in(folder) == new.serial
    assert step > 10
    assert sorted(seen, key=[old.serial, new.serial].index) == seen
    assert {old.serial, new.serial} == set(seen)


def test_left_overs_of_killed_processes_are_removed(folder: CertificateFolder, authority: FakeAuthority) -> None:
    """Old ones only: another process may be about to use a new one."""
    folder.install(issue(authority))
    unused = folder.prepare(issue(authority))
    (torn := folder.path / ".new-torn").mkdir()
    folder.clean()
    assert (unused.exists(), torn.exists()) == (True, True)
    for path in (unused, torn):
        os.utime(path, (0, time.time() - 7200))
    folder.clean()
    assert (unused.exists(), torn.exists()) == (False, False)
    serial_in(folder)


def test_only_the_owner_can_read(folder: CertificateFolder, authority: FakeAuthority) -> None:
    """Under any umask: folders 0700, keys 0600, those of an enrollment in progress too."""
    before = os.umask(0)
    try:
        folder.pending()
        folder.install(issue(authority))
    finally:
        os.umask(before)
    folders = [folder.path, folder.path / "pending", folder.current.resolve()]
    assert [stat.S_IMODE(path.stat().st_mode) for path in folders] == [0o700] * 3
    keys = [folder.path / "pending" / "tls.key", folder.files()["key"]]
    assert [stat.S_IMODE(path.stat().st_mode) for path in keys] == [0o600] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_root_gives_the_files_to_the_owner_of_the_state_directory(tmp_path: Path, authority: FakeAuthority) -> None:
    """The service's user reads what `sudo fl-client init` wrote."""
    (state := tmp_path / "state").mkdir()
    os.chown(state, 12345, 12346)
    folder = CertificateFolder.in_state(state)
    folder.pending()
    folder.install(issue(authority))
    owners = {(path.lstat().st_uid, path.lstat().st_gid) for path in [folder.path, *folder.path.rglob("*")]}
    assert owners == {(12345, 12346)}


def test_a_pending_request_is_kept_until_its_end(folder: CertificateFolder) -> None:
    """The same key and request in each process, and others afterwards."""
    first = folder.pending()
    assert CertificateFolder(folder.path).pending() == first
    folder.end_pending()
    assert folder.pending().key != first.key


def test_the_time_of_the_renewal_survives_with_the_certificate(
    folder: CertificateFolder, authority: FakeAuthority
) -> None:
    """The coordinator's time; without the file, two thirds of the certificate's life."""
    issued = issue(authority)
    folder.install(issued)
    assert folder.renew_after() == issued.renew_after
    for content in ("", "[]", '{"renew_after": null}', '{"renew_after": Infinity}'):
        (folder.current / "renewal.json").write_text(content)
        assert abs(folder.renew_after() - issued.renew_after) < timedelta(minutes=5).total_seconds(), content


def test_a_repeat_changes_nothing(folder: CertificateFolder, authority: FakeAuthority) -> None:
    """The same certificate may be installed again."""
    issued = issue(authority)
    folder.install(issued)
    before = files_below(folder.path)
    folder.install(issued)
    assert files_below(folder.path) == before
