"""Identities in certificates, and the permissions of their callers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509

from fl_server import identity
from fl_server.errors import CertificateEnded, Forbidden
from fl_server.identity import (
    ANYBODY,
    Identity,
    actor,
    address_of,
    caller,
    of_connection,
    require_name,
)
from tests.processes.certificates import Pki

URI = x509.UniformResourceIdentifier


@pytest.fixture
def edge() -> Iterator[None]:
    """The caller is client edge-3."""
    token = caller.set(Identity("client", "edge-3"))
    yield
    caller.reset(token)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """An authority that signs certificates with any names."""
    return Pki(tmp_path_factory.mktemp("pki"))


def connection(pki: Pki, *names: Any, ends: datetime | None = None) -> dict[str, Any]:
    """The transport's properties of a connection with such a certificate."""
    pem = pki.forge("leaf", list(names), ends).cert.read_bytes()
    # The transport does not distinguish the kinds of names.
    mixed = tuple(str(name.value).encode() for name in names)
    return {"transport_security_type": (b"ssl",), "x509_pem_cert": (pem,), "x509_subject_alternative_name": mixed}


def test_the_identity_of_a_certificate(pki: Pki) -> None:
    """Role, name, end and serial number, next to names of other kinds."""
    auth = connection(pki, x509.DNSName("edge.example.org"), URI("fl://client/edge-3"))
    leaf = x509.load_pem_x509_certificate(auth["x509_pem_cert"][0])
    found = of_connection(auth)
    assert (str(found), found.serial) == ("client:edge-3", f"{leaf.serial_number:x}")
    assert found.ends == leaf.not_valid_after_utc.timestamp()
    assert of_connection(auth) is found  # read once


WITHOUT_IDENTITY = {
    "dns": [x509.DNSName("fl://admin/x")],
    "mail": [x509.RFC822Name("fl://admin/x")],
    "first-of-two": [URI("fl://admin/x"), URI("fl://client/b")],
    "the-same-twice": [URI("fl://admin/x"), URI("fl://admin/x")],
    "one-of-two-schemes": [URI("fl://admin/x"), URI("https://example.org/x")],
    "before-a-nul": [URI("fl://admin/x\0.example.org")],
    "line-feed": [URI("fl://admin/x\n")],
    "percent": [URI("fl://admin/%78")],
    "user": [URI("fl://me@admin/x")],
    "port": [URI("fl://admin:443/x")],
    "query": [URI("fl://admin/x?a=b")],
    "fragment": [URI("fl://admin/x#y")],
    "path": [URI("fl://admin/x/y")],
    "slash": [URI("fl://admin/x/")],
    "case-of-the-role": [URI("fl://ADMIN/x")],
    "case-of-the-scheme": [URI("FL://admin/x")],
    "unknown-role": [URI("fl://root/x")],
    "no-name": [URI("fl://admin/")],
    "dots": [URI("fl://admin/..")],
    "long": [URI("fl://admin/" + "x" * 65)],
    "other-scheme": [URI("https://admin/x")],
    "no-names": [],
}


@pytest.mark.parametrize("names", WITHOUT_IDENTITY.values(), ids=WITHOUT_IDENTITY)
def test_a_certificate_needs_exactly_one_plain_uri(pki: Pki, names: list[x509.GeneralName]) -> None:
    """Others are refused with the expected form in one line, at the next call from memory."""
    auth = connection(pki, *names)
    for _ in range(2):
        with pytest.raises(Forbidden, match="expected") as refused:
            of_connection(auth)
        assert "\n" not in str(refused.value)
        assert "fl://ROLE/NAME" in str(refused.value)


def test_a_connection_without_certificate_has_no_identity() -> None:
    """Plain text, and TLS without client certificates, if the settings allow them."""
    assert of_connection({}) is ANYBODY
    assert of_connection({"transport_security_type": (b"ssl",)}) is ANYBODY


def test_the_remembered_certificates_are_limited(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate that was not used for long is parsed again."""
    monkeypatch.setattr(identity, "_KNOWN", 2)
    first = connection(pki, URI("fl://client/a"))
    before = of_connection(first)
    for name in "bcd":
        of_connection(connection(pki, URI(f"fl://client/{name}")))
    assert len(identity._known) == 2
    again = of_connection(first)
    assert (again == before, again is before) == (True, False)


def test_an_expired_certificate_is_refused(pki: Pki) -> None:
    """Also on a connection that was opened before the expiry."""
    ended = of_connection(connection(pki, URI("fl://client/a"), ends=datetime.now(UTC) - timedelta(seconds=1)))
    with pytest.raises(CertificateEnded, match=r"the certificate of client:a ended on .* UTC: connect again"):
        ended.check_time()
    of_connection(connection(pki, URI("fl://client/a"))).check_time()
    ANYBODY.check_time()


@pytest.mark.parametrize(
    ("peer", "shown"),
    [
        ("ipv4:192.0.2.7:5000", "192.0.2.7:5000"),
        ("ipv6:%5B2001:db8::7%5D:5000", "[2001:db8::7]:5000"),
        ("unix:/run/x", "unix:/run/x"),
        ("", ""),
    ],
)
def test_an_address_is_shown_in_its_usual_form(peer: str, shown: str) -> None:
    """The transport's form is that of URIs."""
    assert address_of(peer) == shown


def test_the_name_is_enforced(edge: None) -> None:
    """The right one passes; an error for others has the caller and the required identity."""
    require_name("edge-3")
    with pytest.raises(Forbidden, match="needed: a certificate with the name 'edge-4', or client_id = 'edge-3'"):
        require_name("edge-4")
    assert actor() == "client:edge-3"


def test_without_certificates_every_caller_passes() -> None:
    """Plain text has no identities; the history calls an operator admin."""
    assert caller.get() is ANYBODY
    require_name("anything")
    assert actor() == "admin"
