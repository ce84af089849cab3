"""Requests for a certificate, and the check of the answer. The private key is made here and is in no message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from fl_client.errors import UnusableCertificate
from fl_common.certificates.names import Holder, NoHolder, holder_of
from protos.fl.v1.enrollment_pb2 import IssuedCertificate

_SHARE = 2 / 3
"""Part of a certificate's life after which it is renewed, where the coordinator does not name the time."""


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """A private key and a request for its certificate."""

    key: bytes
    """PEM, without a password."""
    csr: bytes
    """PKCS#10 in DER, with an empty subject: the coordinator decides about the names."""

    def __repr__(self) -> str:
        return f"KeyRequest(csr={len(self.csr)} bytes)"


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate with its key and authority, as they go to the disk."""

    name: str
    """The id that the client will have."""
    cert: bytes
    """PEM: the certificate, then intermediate authorities."""
    key: bytes
    ca: bytes
    """PEM: the authorities of the coordinator's certificate."""
    serial: str
    renew_after: float
    """Unix seconds."""
    labels: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Issued(name={self.name!r}, serial={self.serial!r})"


def new_request() -> KeyRequest:
    """A new key on P-256 and its request."""
    return _request(ec.generate_private_key(ec.SECP256R1()))


def request_of(key_pem: bytes) -> KeyRequest:
    """A request for an existing key. Raises ValueError for one that is not on an elliptic curve."""
    key = load_pem_private_key(key_pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("expected an elliptic-curve key, got one of another kind")
    return _request(key)


def _request(key: ec.EllipticCurvePrivateKey) -> KeyRequest:
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return KeyRequest(pem, csr.public_bytes(Encoding.DER))


def signed(data: bytes, key_pem: bytes) -> bytes:
    """The signature of `data`: ECDSA with SHA-256, or Ed25519. Raises UnusableCertificate for a key of another kind."""
    key = load_pem_private_key(key_pem, password=None)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(data, ec.ECDSA(hashes.SHA256()))
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(data)
    raise UnusableCertificate("expected an EC or Ed25519 key of the expired certificate, got one of another kind")


def checked(issued: IssuedCertificate, key_pem: bytes, name: str = "") -> Issued:
    """The answer, if it fits the key. Dates are not checked, because this device's clock may be wrong.

    name: the client id that the certificate must have; empty: any.

    Raises:
        UnusableCertificate: it is for another key, for another holder, or cannot be parsed.
    """
    try:
        leaf = x509.load_pem_x509_certificates(issued.chain)[0]
        x509.load_pem_x509_certificates(issued.authority)
        own = load_pem_private_key(key_pem, password=None).public_key() == leaf.public_key()
        holder = holder_of(leaf)
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:  # NoHolder is a ValueError
        what = str(error) if isinstance(error, NoHolder) else f"one that cannot be parsed ({error})"
        raise UnusableCertificate(f"expected a client's certificate and its authority, got {what}") from None
    if not own:
        raise UnusableCertificate("expected a certificate for this device's new key, got one for another key")
    if holder.role != "client" or (name and holder != Holder("client", name)):
        wanted = f"fl://client/{name}" if name else "a client"
        raise UnusableCertificate(f"expected a certificate of {wanted}, got one of {holder.uri}")
    return Issued(
        holder.name,
        issued.chain,
        key_pem,
        issued.authority,
        f"{leaf.serial_number:x}",
        issued.renew_after.seconds + issued.renew_after.nanos / 1e9 or renew_time(leaf),
        dict(issued.labels),
    )


def renew_time(leaf: x509.Certificate) -> float:
    """Unix seconds at which two thirds of a certificate's life are over."""
    begin, end = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
    return begin + (end - begin) * _SHARE
