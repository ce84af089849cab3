"""Signs the certificate of one holder: a server, a client or an operator.

Profile: RFC 5280, the holder's URI and hosts as alternative names, one purpose. Pure functions: the caller passes the
time and the keys.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fl_common.certificates.names import SERVING_ROLES, Holder

CLOCK_SKEW = timedelta(minutes=5)
"""Certificates are valid from this long before their issue, because clocks of devices may be slow."""
_LONGEST_DNS_NAME = 253


@dataclass(frozen=True)
class Authority:
    """A certificate that signs others, and its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Period:
    """When a certificate is valid."""

    begins: datetime
    ends: datetime

    @property
    def seconds(self) -> float:
        """The time between begin and end."""
        return (self.ends - self.begins).total_seconds()


def period_of(certificate: x509.Certificate) -> Period:
    """When a certificate is valid."""
    return Period(certificate.not_valid_before_utc, certificate.not_valid_after_utc)


@dataclass(frozen=True, slots=True)
class Leaf:
    """What a certificate states."""

    holder: Holder
    """A server may authenticate itself as a server only, all others as clients only."""
    period: Period
    """Taken as it is; the caller allows for slow clocks."""
    hosts: Sequence[str] = ()
    """DNS names and IP addresses of a server."""


def sign_leaf(authority: Authority, leaf: Leaf, public_key: ec.EllipticCurvePublicKey) -> x509.Certificate:
    """The certificate of the key's holder, with a random serial number, signed with ECDSA and SHA-256.

    Raises ValueError for a host that is neither a DNS name nor an IP address.
    """
    holder = leaf.holder
    builder = builder_of(common_name(holder.name), authority.certificate.subject, public_key, leaf.period)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(key_usage("digital_signature"), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes_of(holder.role)), critical=False)
    names = [x509.UniformResourceIdentifier(holder.uri), *map(_host_name, leaf.hosts)]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(_issuer_key_id(authority), critical=False)
    return builder.sign(authority.key, hashes.SHA256())


def builder_of(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, period: Period
) -> x509.CertificateBuilder:
    """A certificate with the common fields: names, a random serial number, validity and the key's id."""
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(period.begins)
        .not_valid_after(period.ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def common_name(name: str) -> x509.Name:
    """A subject that consists of a common name."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def key_usage(*allowed: str) -> x509.KeyUsage:
    """The extension with these uses, by their names in `x509.KeyUsage`."""
    names = (
        "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
        "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
    )  # fmt: skip
    return x509.KeyUsage(**{name: name in allowed for name in names})


def _issuer_key_id(issuer: Authority) -> x509.AuthorityKeyIdentifier:
    try:
        own = issuer.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    except x509.ExtensionNotFound:  # an authority of another program
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.key.public_key())
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own)


def purposes_of(role: str) -> list[x509.ObjectIdentifier]:
    """What a holder of this role may prove with its certificate: as a server, as a client."""
    serves = [ExtendedKeyUsageOID.SERVER_AUTH] if role in SERVING_ROLES else []
    return serves if role == "server" else [*serves, ExtendedKeyUsageOID.CLIENT_AUTH]


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


def key_id(authority: x509.Certificate) -> str:
    """The id of an authority's key in hex, as the certificates that it signs name it."""
    try:
        return authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest.hex()
    except x509.ExtensionNotFound:  # an authority of another program
        key = authority.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey)  # noqa: S101 - TLS has no others
        return x509.SubjectKeyIdentifier.from_public_key(key).digest.hex()


def issuer_key_id(certificate: x509.Certificate) -> str:
    """The id of the key that signed a certificate, in hex; empty if the certificate does not name it."""
    try:
        named = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    except (x509.ExtensionNotFound, ValueError):
        return ""
    return "" if named is None else named.hex()


def is_issuer(authority: x509.Certificate, certificate: x509.Certificate) -> bool:
    """Whether the authority signed the certificate."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True
