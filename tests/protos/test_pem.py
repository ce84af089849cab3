"""PEM files that are renewed under a running process: what is used, what is not, and what is said of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from fl_ops import ca
from protos.pem import Look, PemFiles, Watched
from protos.settings import SettingsError

NOW = datetime.now(UTC)
DECADE = ca.Validity(NOW - timedelta(days=400), 3650)
AUTHORITY = ca.make_authority("Test CA", DECADE)
ROOT = ca.certificate_pem(AUTHORITY.certificate)

ANOTHER_KEY = "tls.key: expected the private key of .*tls.crt, got another"


def pair(days=90, began=1, authority=AUTHORITY):
    """Certificate and key of edge-1 in PEM, valid for so many days from so many days ago."""
    validity = ca.Validity(NOW - timedelta(days=began), days)
    certificate, key = ca.issue(authority, ca.Identity("client", "edge-1"), validity)
    return ca.certificate_pem(certificate), ca.key_pem(key)


@pytest.fixture
def files(tmp_path):
    """A certificate, its key and its authority."""
    files = PemFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt")
    put(files, *pair())
    files.ca.write_bytes(ROOT)
    return files


def put(files, certificate, key):
    """Write a pair over the one that is there."""
    files.cert.write_bytes(certificate)
    files.key.touch(0o600)
    files.key.write_bytes(key)


def test_what_is_new_is_used_when_it_was_found_twice(files):
    """The first look may have seen the middle of a renewal; at the third there is nothing new."""
    watched = Watched(files)
    put(files, *(new := pair()))
    assert [watched.look() for _ in range(3)] == [Look.SAME, Look.RENEWED, Look.SAME]
    assert (watched.pem.cert, watched.pem.key) == new


def test_who_connects_anew_takes_what_is_there(files):
    """Nothing is to be lost by it."""
    watched = Watched(files)
    put(files, *pair())
    assert watched.look(at_once=True) is Look.RENEWED


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
def test_what_does_not_fit_is_told_once_and_not_used(files, spoil, words):
    """The earlier contents stay in use, and what is put right later is taken."""
    watched = Watched(files)
    before = watched.pem
    spoil(files)
    assert [watched.look() for _ in range(4)].count(Look.UNUSABLE) == 1
    assert watched.pem is before
    with pytest.raises(SettingsError, match=words):
        raise SettingsError(watched.trouble)
    put(files, *pair())
    files.ca.write_bytes(ROOT)
    assert [watched.look(), watched.look()][-1] is Look.RENEWED
    assert watched.trouble == ""


def test_what_was_put_back_is_no_trouble(files):
    """The old files again: nothing is new, and nothing is wrong."""
    watched = Watched(files)
    files.cert.write_bytes(pair()[0])
    assert [watched.look(), watched.look()] == [Look.SAME, Look.UNUSABLE]
    put(files, watched.pem.cert, watched.pem.key)
    assert watched.look() is Look.SAME
    assert watched.trouble == ""


def test_the_owners_own_check_counts_too(files):
    """What must not be used is not used, whatever the reason."""
    refused = []

    def check(pem):
        if refused:
            raise SettingsError("not this one")

    watched = Watched(files, check)
    refused.append(True)
    put(files, *pair())
    assert watched.look(at_once=True) is Look.UNUSABLE
    assert watched.trouble == "not this one"


def test_ends(files):
    """A chain ends with its first certificate to end, a bundle of authorities with its last."""
    longer = ca.make_authority("Next CA", ca.Validity(NOW, 3650))
    files.ca.write_bytes(ca.certificate_pem(longer.certificate) + ROOT)
    leaf = files.read().leaf
    files.cert.write_bytes(files.cert.read_bytes() + ROOT)
    last = longer.certificate.not_valid_after_utc
    assert files.read().ends() == {"cert": leaf.not_valid_after_utc.timestamp(), "ca": last.timestamp()}


@pytest.mark.parametrize(("days_later", "ending"), [(60, False), (70, True)])
def test_a_renewal_that_seems_forgotten(files, days_later, ending):
    """Of 90 days that began a day ago, the last quarter begins after 67.5 - 1 days."""
    assert files.read().ending(NOW + timedelta(days=days_later)) is ending
