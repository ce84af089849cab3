"""Certificate requests: only the key is used, and everything that could mean another holder is refused."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding

from fl_common.certificates.names import Holder
from fl_server.enrollment.requests import read_request
from fl_server.errors import InvalidInput, NotEnrolled
from tests.processes.enrollment import csr_of, new_key

EDGE = Holder("client", "edge-7")
OWN = x509.UniformResourceIdentifier(EDGE.uri)


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda curve: curve.name)
def test_a_request_gives_its_key(curve: ec.EllipticCurve) -> None:
    """With no names, or with the holder's."""
    key = ec.generate_private_key(curve)
    for csr in (csr_of(key), csr_of(key, "edge-7", [OWN])):
        assert read_request(csr, EDGE).key == key.public_key()


@pytest.mark.parametrize(
    ("common_name", "names"),
    [
        ("edge-8", []),
        ("fl://client/edge-7", []),
        ("", [x509.UniformResourceIdentifier("fl://client/edge-8")]),
        ("", [x509.UniformResourceIdentifier("fl://admin/edge-7")]),
        ("", [OWN, x509.UniformResourceIdentifier("fl://client/edge-8")]),
        ("", [OWN, x509.DNSName("edge-7")]),
        ("edge-7", [x509.RFC822Name("edge-7@example.org")]),
    ],
)
def test_a_request_that_names_another_holder_is_refused(common_name: str, names: list[x509.GeneralName]) -> None:
    """In its subject or in its alternative names, also beside the right name."""
    with pytest.raises(NotEnrolled, match="a request that names nobody or fl://client/edge-7; it names '"):
        read_request(csr_of(new_key(), common_name, names), EDGE)


@pytest.mark.parametrize(
    ("key", "came"),
    [
        (rsa.generate_private_key(65537, 2048), "RSAPublicKey 2048"),
        (ec.generate_private_key(ec.SECP256K1()), "a key on secp256k1"),
        (ec.generate_private_key(ec.SECP224R1()), "a key on secp224r1"),
    ],
    ids=["rsa", "other curve", "short"],
)
def test_a_weak_or_unsupported_key_is_refused(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey, came: str) -> None:
    """The message has the supported kinds and the one that came."""
    with pytest.raises(InvalidInput) as refused:
        read_request(csr_of(key), EDGE)
    assert "an elliptic-curve key on P-256, P-384 or P-521" in str(refused.value)
    assert came in str(refused.value)


def test_a_key_of_another_kind_is_refused() -> None:
    """Ed25519: gRPC's TLS accepts no such certificate."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    csr = builder.sign(ed25519.Ed25519PrivateKey.generate(), None).public_bytes(Encoding.DER)
    with pytest.raises(InvalidInput, match="got Ed25519PublicKey"):
        read_request(csr, EDGE)


def test_a_short_digest_is_refused() -> None:
    """SHA-224."""
    with pytest.raises(InvalidInput, match="signed with SHA-256, SHA-384 or SHA-512, got sha224"):
        read_request(csr_of(new_key(), digest=hashes.SHA224()), EDGE)


def test_a_request_of_a_key_that_its_sender_does_not_have_is_refused() -> None:
    """The signature of another request under this key."""
    mine, other = csr_of(new_key()), csr_of(new_key())
    stolen = x509.load_der_x509_csr(mine).tbs_certrequest_bytes
    signature = x509.load_der_x509_csr(other).signature
    own = x509.load_der_x509_csr(mine).signature
    # Signatures have one of three lengths: the length fields fit if both are the same.
    while len(signature) != len(own):
        other = csr_of(new_key())
        signature = x509.load_der_x509_csr(other).signature
    forged = mine.replace(own, signature)
    assert x509.load_der_x509_csr(forged).tbs_certrequest_bytes == stolen
    with pytest.raises(InvalidInput, match="a request signed by its own key, got another signature"):
        read_request(forged, EDGE)


@pytest.mark.parametrize("csr", [b"", b"\0", b"-----BEGIN", b"0" * 9000])
def test_other_bytes_are_no_request(csr: bytes) -> None:
    """The message has the expected form."""
    with pytest.raises(InvalidInput, match=r"csr: expected a certificate request in DER \(PKCS#10\)"):
        read_request(csr, EDGE)


def test_a_damaged_request_is_refused() -> None:
    """Each byte of a request replaced: it is refused, or a name that nobody uses has changed; nothing else happens."""
    csr = csr_of(new_key(), "edge-7", [OWN])
    for place in range(0, len(csr), 3):
        damaged = csr[:place] + bytes([csr[place] ^ 0x55]) + csr[place + 1 :]
        with pytest.raises((InvalidInput, NotEnrolled)):
            read_request(damaged, EDGE)
