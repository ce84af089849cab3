"""Certificates for a site without a PKI: an authority, and leaves with role and name in a URI.

Examples: fl://client/edge-3, fl://admin/alice, fl://server/coordinator. Pure functions: the caller passes the time and
writes the files. Profile: RFC 5280; ECDSA on P-256 with SHA-256.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fl_common.certificates.leaf import (
    CLOCK_SKEW,
    Authority,
    Leaf,
    Period,
    builder_of,
    common_name,
    key_usage,
    purposes_of,
    sign_leaf,
)
from fl_common.certificates.names import ROLES, SERVING_ROLES, Holder, holder_of, hosts_of
from fl_common.names import check_id
from fl_common.units import counted

__all__ = [
    "CLOCK_SKEW", "Authority", "Identity", "Validity", "certificate_pem", "identity_of", "issue", "key_pem",
    "load_authority", "load_pair", "make_authority",
]  # fmt: skip
_LONGEST_DAYS = 36_500
_LONGEST_COMMON_NAME = 64


@dataclass(frozen=True)
class Validity:
    """The start, and the number of days."""

    start: datetime
    days: int

    def __post_init__(self) -> None:
        if not 1 <= self.days <= _LONGEST_DAYS:
            raise ValueError(f"expected 1 to {_LONGEST_DAYS} days, got {self.days}")

    @property
    def end(self) -> datetime:
        """The first moment after the validity."""
        return self.start + timedelta(days=self.days)

    @property
    def period(self) -> Period:
        """The times in the certificate."""
        return Period(self.start - CLOCK_SKEW, self.end)


@dataclass(frozen=True)
class Identity:
    """The holder of a leaf. hosts: DNS names and IP addresses of a server or worker; only these have them."""

    role: str
    name: str
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"expected a role of {', '.join(ROLES)}, got {self.role!r}")
        check_id(f"{self.role} name", self.name)
        if (self.role in SERVING_ROLES) != bool(self.hosts):
            raise ValueError(
                f"expected hosts for servers and workers only, and at least one, got {len(self.hosts)} for {self.uri}"
            )

    @property
    def uri(self) -> str:
        """The URI in the subject alternative name."""
        return Holder(self.role, self.name).uri


def make_authority(name: str, validity: Validity, role: str = "") -> Authority:
    """A self-signed authority that can sign leaves, but no other authorities.

    Args:
        name: the common name, 1 to 64 characters.
        validity: of the authority's certificate.
        role: the only role of its leaves, "client", "worker" or "server"; empty: any. TLS itself refuses others (name
            constraints of the holder's URI, and the purpose), so a stolen key makes no operator. An authority of
            workers makes callers of the coordinator only: what a worker shows to devices is of a server's authority.
    """
    if not 1 <= len(name) <= _LONGEST_COMMON_NAME:
        raise ValueError(f"expected a name of 1 to {_LONGEST_COMMON_NAME} characters, got {len(name)}")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = common_name(name)
    builder = builder_of(subject, subject, key.public_key(), validity.period)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(key_usage("key_cert_sign", "crl_sign"), critical=True)
    if role:
        # The host of fl://client/edge-3 is "client".
        allowed = x509.NameConstraints([x509.UniformResourceIdentifier(role)], None)
        builder = builder.add_extension(allowed, critical=True)
        purposes = purposes_of("server" if role == "server" else "client")
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def issue(
    authority: Authority, identity: Identity, validity: Validity
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """A leaf for `identity`, and its new private key.

    Raises:
        ValueError: it would end after the authority; a host is neither a DNS name nor an IP address.
    """
    last = authority.certificate.not_valid_after_utc
    if validity.end > last:
        days = max(0, (last - validity.start).days)
        raise ValueError(
            f"the authority ends on {last:%Y-%m-%d}: expected at most {counted(days, 'day')}, got {validity.days}"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    leaf = Leaf(Holder(identity.role, identity.name), validity.period, identity.hosts)
    return sign_leaf(authority, leaf, key.public_key()), key


def identity_of(certificate: x509.Certificate) -> Identity:
    """The holder of a leaf. Raises ValueError for a certificate that `issue` could not have made."""
    holder = holder_of(certificate)
    return Identity(holder.role, holder.name, tuple(hosts_of(certificate)))


def load_authority(certificate_pem: bytes, key_pem: bytes) -> Authority:
    """The authority of two PEM files: of several certificates, the one that the key belongs to.

    Raises ValueError unless they are an authority's certificate and key.
    """
    certificate, key = load_pair(certificate_pem, key_pem)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    if not constraints.ca or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("expected an authority's certificate with an elliptic-curve key, got another certificate")
    return Authority(certificate, key)


def load_pair(certificate_pem: bytes, key_pem: bytes) -> tuple[x509.Certificate, object]:
    """Certificate and private key of two PEM files. Raises ValueError unless they belong together."""
    certificates = x509.load_pem_x509_certificates(certificate_pem)
    key = serialization.load_pem_private_key(key_pem, password=None)
    for certificate in certificates:
        if key.public_key() == certificate.public_key():
            return certificate, key
    raise ValueError("expected the certificate's own private key, got another key")


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """The certificate as a PEM file."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The private key as a PEM file (PKCS #8), not encrypted: a daemon starts without a password."""
    encryption = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
