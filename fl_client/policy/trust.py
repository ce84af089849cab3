"""Which certificates of a CA bundle a site trusts, by their SHA-256."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding


def trusted_certificates(bundle: bytes, pins: Collection[str]) -> bytes:
    """The pinned certificates of a bundle in PEM, as PEM. Empty if there are none. Raises ValueError for no PEM."""
    found = x509.load_pem_x509_certificates(bundle)
    return b"".join(each.public_bytes(Encoding.PEM) for each in found if fingerprint(each) in pins)


def fingerprints(bundle: bytes) -> list[str]:
    """SHA-256 of each certificate of a bundle in PEM, in hex."""
    return [fingerprint(each) for each in x509.load_pem_x509_certificates(bundle)]


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate in hex, as `openssl x509 -fingerprint -sha256` has it without the colons."""
    return sha256(certificate.public_bytes(Encoding.DER)).hexdigest()
