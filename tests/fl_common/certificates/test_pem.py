"""PEM files that are renewed while the process runs: the used contents and the reports."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fl_common.certificates.leaf import period_of
from fl_common.certificates.pem import Pem, PemChange, PemFiles, PemWatcher
from fl_common.settings import SettingsError
from fl_ops.certificates import ca

NOW = datetime.now(UTC)
DECADE = ca.Validity(NOW - timedelta(days=400), 3650)
AUTHORITY = ca.make_authority("Test CA", DECADE)
ROOT = ca.certificate_pem(AUTHORITY.certificate)

ANOTHER_KEY = "tls.key: expected the private key of .*tls.crt, got another"


def pair(days: int = 90, began: float = 1, authority: ca.Authority = AUTHORITY) -> tuple[bytes, bytes]:
    """Certificate and key of edge-1 in PEM, valid for so many days from so many days ago."""
    validity = ca.Validity(NOW - timedelta(days=began), days)
    certificate, key = ca.issue(authority, ca.Identity("client", "edge-1"), validity)
    return ca.certificate_pem(certificate), ca.key_pem(key)


@pytest.fixture
def files(tmp_path: Path) -> PemFiles:
    """A certificate, its key and its authority."""
    files = PemFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt")
    put(files, *pair())
    (files.cert.parent / "ca.crt").write_bytes(ROOT)
    return files


def put(files: PemFiles, certificate: bytes, key: bytes) -> None:
    """Replace the existing pair."""
    files.cert.write_bytes(certificate)
    files.key.touch(0o600)
    files.key.write_bytes(key)


def test_new_contents_are_used_after_two_equal_reads(files: PemFiles) -> None:
    """The first read may see a partial renewal; the third one finds nothing new."""
    watched = PemWatcher(files)
    put(files, *(new := pair()))
    assert [watched.poll() for _ in range(3)] == [PemChange.SAME, PemChange.RENEWED, PemChange.SAME]
    assert (watched.pem.cert, watched.pem.key) == new


def test_at_once_new_contents_are_used_immediately(files: PemFiles) -> None:
    """A new connection need not wait for the second poll."""
    watched = PemWatcher(files)
    put(files, *pair())
    assert watched.poll(at_once=True) is PemChange.RENEWED


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda files: files.cert.write_bytes(pair()[0]),
            "tls.key: expected the private key of .*tls.crt, got another",
        ),
        (lambda files: files.key.write_bytes(pair()[1]), "tls.key: expected the private key of .*tls.crt, got another"),
        (lambda files: files.key.unlink(), "tls.key: .*tls.key cannot be read: No such file"),
        (lambda files: files.key.write_bytes(pair()[1][:99]), "tls.key: expected a private key without password"),
        (lambda files: files.cert.write_bytes(b""), "tls.cert: expected a PEM file, got .*tls.crt without any"),
        (lambda files: files.ca.write_bytes(ROOT + ROOT[:200]), "tls.ca: expected (whole )?certificates"),
        (lambda files: files.cert.write_bytes(files.key.read_bytes()), "tls.cert: expected certificates in PEM"),
        (lambda files: put(files, *pair(days=2, began=9)), "tls.cert: expected a certificate that is valid now, got"),
        (lambda files: put(files, *pair(days=9, began=-2)), "tls.cert: expected a certificate that is valid now, got"),
    ],
    ids=["certificate", "key", "gone", "torn-key", "empty", "torn-ca", "no-certificate", "ended", "not-yet"],
)
def test_unusable_files_are_reported_once_and_not_used(
    files: PemFiles, spoil: Callable[[PemFiles], object], words: str
) -> None:
    """The earlier contents stay in use, and corrected files are used later."""
    watched = PemWatcher(files)
    before = watched.pem
    spoil(files)
    assert [watched.poll() for _ in range(4)].count(PemChange.UNUSABLE) == 1
    assert watched.pem is before
    with pytest.raises(SettingsError, match=words):
        raise SettingsError(watched.problem)
    put(files, *pair())
    (files.cert.parent / "ca.crt").write_bytes(ROOT)
    assert [watched.poll(), watched.poll()][-1] is PemChange.RENEWED
    assert watched.problem == ""


def test_restored_files_are_no_error(files: PemFiles) -> None:
    """With the old files back nothing is new, and nothing is wrong."""
    watched = PemWatcher(files)
    files.cert.write_bytes(pair()[0])
    assert [watched.poll(), watched.poll()] == [PemChange.SAME, PemChange.UNUSABLE]
    put(files, watched.pem.cert, watched.pem.key)
    assert watched.poll() is PemChange.SAME
    assert watched.problem == ""


def test_the_owners_own_check_counts_too(files: PemFiles) -> None:
    """Contents that fail the further check are not used."""
    refused: list[bool] = []

    def check(pem: Pem) -> None:
        if refused:
            raise SettingsError("not this one")

    watched = PemWatcher(files, check)
    refused.append(True)
    put(files, *pair())
    assert watched.poll(at_once=True) is PemChange.UNUSABLE
    assert watched.problem == "not this one"


def test_periods(files: PemFiles) -> None:
    """A chain has the period of its first expiring certificate, a bundle of authorities that of its last."""
    longer = ca.make_authority("Next CA", ca.Validity(NOW, 3650))
    (files.cert.parent / "ca.crt").write_bytes(ca.certificate_pem(longer.certificate) + ROOT)
    leaf = files.read().leaf
    files.cert.write_bytes(files.cert.read_bytes() + ROOT)
    assert files.read().periods() == {"cert": period_of(leaf), "ca": period_of(longer.certificate)}


@pytest.mark.parametrize(("days_later", "ending"), [(60, False), (70, True)])
def test_a_renewal_that_seems_forgotten(files: PemFiles, days_later: float, ending: bool) -> None:
    """Of 90 days that began a day ago, the last quarter begins after 67.5 - 1 days."""
    assert files.read().ending(NOW + timedelta(days=days_later)) is ending
