"""Certificates for a site without a PKI: an authority, and leaves with role and name in a URI.

Examples: fl://client/edge-3, fl://admin/alice, fl://server/coordinator. Pure functions: the caller passes the time and
writes the files. Profile: RFC 5280; ECDSA on P-256 with SHA-256.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fl_common.certificate_names import ROLES, SCHEME, holder_of
from fl_common.names import check_id

CLOCK_SKEW = timedelta(minutes=5)
"""Certificates are valid from this long before their issue, because clocks of devices may be slow."""
_LONGEST_DAYS = 36_500
_LONGEST_COMMON_NAME = 64
_LONGEST_DNS_NAME = 253


@dataclass(frozen=True)
class Authority:
    """A certificate that signs others, and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


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


@dataclass(frozen=True)
class Identity:
    """The holder of a leaf. hosts: DNS names and IP addresses of a server; only servers have them."""

    role: str
    name: str
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"expected a role of {', '.join(ROLES)}, got {self.role!r}")
        check_id(f"{self.role} name", self.name)
        if (self.role == "server") != bool(self.hosts):
            raise ValueError(f"expected hosts for servers only, and at least one, got {len(self.hosts)} for {self.uri}")

    @property
    def uri(self) -> str:
        """The URI in the subject alternative name."""
        return f"{SCHEME}://{self.role}/{self.name}"


def make_authority(name: str, validity: Validity) -> Authority:
    """A self-signed authority that can sign leaves, but no other authorities.

    Args:
        name: the common name, 1 to 64 characters.
        validity: of the authority's certificate.
    """
    if not 1 <= len(name) <= _LONGEST_COMMON_NAME:
        raise ValueError(f"expected a name of 1 to {_LONGEST_COMMON_NAME} characters, got {len(name)}")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _common_name(name)
    builder = _builder(subject, subject, key.public_key(), validity)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage("key_cert_sign", "crl_sign"), critical=True)
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
        raise ValueError(f"the authority ends on {last:%Y-%m-%d}: expected at most {days} days, got {validity.days}")
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_common_name(identity.name), authority.certificate.subject, key.public_key(), validity)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage("digital_signature"), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([_purpose(identity.role)]), critical=False)
    builder = builder.add_extension(_alternative_names(identity), critical=False)
    issuer_key = authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    key_id = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key)
    builder = builder.add_extension(key_id, critical=False)
    return builder.sign(authority.key, hashes.SHA256()), key


def identity_of(certificate: x509.Certificate) -> Identity:
    """The holder of a leaf. Raises ValueError for a certificate that `issue` could not have made."""
    holder = holder_of(certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = (str(address) for address in names.get_values_for_type(x509.IPAddress))
    return Identity(holder.role, holder.name, (*names.get_values_for_type(x509.DNSName), *addresses))


def load_authority(certificate_pem: bytes, key_pem: bytes) -> Authority:
    """The authority of two PEM files. Raises ValueError unless they are one authority's certificate and key."""
    certificate, key = load_pair(certificate_pem, key_pem)
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    if not constraints.ca or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("expected an authority's certificate with an elliptic-curve key, got another certificate")
    return Authority(certificate, key)


def load_pair(certificate_pem: bytes, key_pem: bytes) -> tuple[x509.Certificate, object]:
    """Certificate and private key of two PEM files. Raises ValueError unless they belong together."""
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    key = serialization.load_pem_private_key(key_pem, password=None)
    if key.public_key() != certificate.public_key():
        raise ValueError("expected the certificate's own private key, got another key")
    return certificate, key


def certificate_pem(certificate: x509.Certificate) -> bytes:
    """The certificate as a PEM file."""
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The private key as a PEM file (PKCS #8), not encrypted: a daemon starts without a password."""
    encryption = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, validity: Validity
) -> x509.CertificateBuilder:
    """A certificate with the common fields: names, a random serial number, validity and the key's id."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(validity.start - CLOCK_SKEW)
        .not_valid_after(validity.end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _purpose(role: str) -> x509.ObjectIdentifier:
    return ExtendedKeyUsageOID.SERVER_AUTH if role == "server" else ExtendedKeyUsageOID.CLIENT_AUTH


def _alternative_names(identity: Identity) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName(
        [x509.UniformResourceIdentifier(identity.uri), *(_host_name(host) for host in identity.hosts)]
    )


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.removeprefix("*.").split(".")
    if len(host) > _LONGEST_DNS_NAME or not all(
        label.isascii() and label.replace("-", "a").isalnum() for label in labels
    ):
        raise ValueError(f"expected a DNS name or an IP address as host, got {host!r}") from None
    return x509.DNSName(host)


def _key_usage(*allowed: str) -> x509.KeyUsage:
    names = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{name: name in allowed for name in names})
