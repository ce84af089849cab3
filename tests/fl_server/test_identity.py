"""Names in certificates, and what a caller with one may do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

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
    require_role,
)
from tests.hostile.certificates import Pki

URI = x509.UniformResourceIdentifier


@pytest.fixture
def edge():
    """The call is client edge-3's."""
    token = caller.set(Identity("client", "edge-3"))
    yield
    caller.reset(token)


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """An authority that signs whatever it is asked for."""
    return Pki(tmp_path_factory.mktemp("pki"))


def connection(pki, *names, ends=None):
    """What the transport knows of a connection that was made with such a certificate."""
    pem = pki.forge("leaf", list(names), ends).cert.read_bytes()
    # The transport hands names of all kinds on as if they were of one.
    mixed = tuple(str(name.value).encode() for name in names)
    return {"transport_security_type": (b"ssl",), "x509_pem_cert": (pem,), "x509_subject_alternative_name": mixed}


def test_the_identity_of_a_certificate(pki):
    """Role, name, end and serial number, beside names of other kinds."""
    auth = connection(pki, x509.DNSName("edge.example.org"), URI("fl://client/edge-3"))
    leaf = x509.load_pem_x509_certificate(auth["x509_pem_cert"][0])
    found = of_connection(auth)
    assert (str(found), found.serial) == ("client:edge-3", f"{leaf.serial_number:x}")
    assert found.ends == leaf.not_valid_after_utc.timestamp()
    assert of_connection(auth) is found  # read once


NOBODY = {
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


@pytest.mark.parametrize("names", NOBODY.values(), ids=NOBODY)
def test_everything_but_one_plain_uri_is_nobody(pki, names):
    """Refused in one line that shows what was expected; and as quickly again at the next call."""
    auth = connection(pki, *names)
    for _ in range(2):
        with pytest.raises(Forbidden, match="expected") as refused:
            of_connection(auth)
        assert "\n" not in str(refused.value)
        assert "fl://ROLE/NAME" in str(refused.value)


def test_a_connection_without_certificate_has_no_identity():
    """Plain text, and TLS that asks for none, where the settings allow either by name."""
    assert of_connection({}) is ANYBODY
    assert of_connection({"transport_security_type": (b"ssl",)}) is ANYBODY


def test_what_is_remembered_is_bounded(pki, monkeypatch):
    """A certificate that was not seen for long is read anew."""
    monkeypatch.setattr(identity, "_KNOWN", 2)
    first = connection(pki, URI("fl://client/a"))
    before = of_connection(first)
    for name in "bcd":
        of_connection(connection(pki, URI(f"fl://client/{name}")))
    assert len(identity._known) == 2
    again = of_connection(first)
    assert (again == before, again is before) == (True, False)


def test_a_certificate_that_has_ended_is_no_good_any_more(pki):
    """Also over a connection that was opened in time."""
    ended = of_connection(connection(pki, URI("fl://client/a"), ends=datetime.now(UTC) - timedelta(seconds=1)))
    with pytest.raises(CertificateEnded, match=r"the certificate of client:a ended on .* UTC: connect anew"):
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
def test_an_address_is_shown_as_people_write_it(peer, shown):
    """The transport's own spelling is for URIs."""
    assert address_of(peer) == shown


def test_a_role_and_a_name_are_held_to(edge):
    """The right ones pass; another is refused with who it is and what is needed."""
    require_role("client")
    require_name("edge-3")
    with pytest.raises(Forbidden, match="client:edge-3 is not allowed to do this; needed: .* the role admin"):
        require_role("admin")
    with pytest.raises(Forbidden, match="needed: a certificate with the name 'edge-4', or client_id = 'edge-3'"):
        require_name("edge-4")
    assert actor() == "client:edge-3"


def test_without_certificates_everybody_passes():
    """Plain text has no identities; history calls an operator admin."""
    assert caller.get() is ANYBODY
    require_role("admin")
    require_name("anything")
    assert actor() == "admin"


def test_a_certificate_cannot_claim_to_be_anybody():
    """An identity with the words of ANYBODY is still one, and is held to its role."""
    token = caller.set(Identity("anybody", ""))
    with pytest.raises(Forbidden):
        require_role("admin")
    caller.reset(token)
