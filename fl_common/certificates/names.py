"""The holder of a certificate: its role and name, as the URI fl://ROLE/NAME in the subject alternative name.

Only names of type URI count. A DNS name or a mail address may have the same text, but an authority checks those in
another way. A certificate with two URIs has no holder, because either could be meant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cryptography import x509

from fl_common.names import ID_PATTERN

OPERATOR_ROLES = ("viewer", "operator", "enroller", "admin")
"""Roles of people and programs that call the Admin service."""
SERVING_ROLES = ("server", "worker")
"""Roles with hosts: a coordinator, and a process that ends clients' streams for it and calls it."""
ROLES = (*SERVING_ROLES, "client", *OPERATOR_ROLES)
"""Roles of a holder."""
SCHEME = "fl"
_URI = re.compile(rf"{SCHEME}://({'|'.join(ROLES)})/({ID_PATTERN.pattern})")
_MAX_SHOWN = 8


def read_certificate(pem: bytes) -> x509.Certificate:
    """The first certificate of a PEM text. Raises ValueError for anything else."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except x509.InvalidVersion as error:  # the library's only error here that is no ValueError
        raise ValueError(str(error)) from None


class NoHolder(ValueError):
    """The certificate does not name exactly one holder."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Role and name in a certificate's URI."""

    role: str
    """One of ROLES."""
    name: str

    @property
    def uri(self) -> str:
        """The URI in the certificate."""
        return f"{SCHEME}://{self.role}/{self.name}"


def parse_uri(uri: str) -> Holder:
    """The holder that a URI names. Raises NoHolder unless the URI is exactly fl://ROLE/NAME.

    Names consist of the characters of an id. Anything else is refused and never normalized: other schemes, user, port,
    query, fragment, a longer path, percent-encoding, control characters.
    """
    parts = _URI.fullmatch(uri)
    if parts is None:
        raise NoHolder(f"expected fl://ROLE/NAME with a role of {', '.join(ROLES)}, got {uri[:120]!r}")
    return Holder(parts[1], parts[2])


def holder_of(certificate: x509.Certificate) -> Holder:
    """The holder of a leaf certificate. Raises NoHolder unless it has exactly one URI, and that names a holder."""
    uris = uris_of(certificate)
    if len(uris) != 1:
        raise NoHolder(f"expected a certificate with one URI fl://ROLE/NAME, got {_shown(uris)}")
    return parse_uri(uris[0])


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The DNS names and addresses of a certificate. Raises ValueError for unreadable names."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]


def uris_of(certificate: x509.Certificate) -> list[str]:
    """All URIs of the subject alternative name. Raises NoHolder if the extension cannot be read."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise NoHolder(f"expected one URI fl://ROLE/NAME, got names that cannot be read: {error}") from None
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def _shown(uris: list[str]) -> str:
    if not uris:
        return "none"
    rest = f" and {len(uris) - _MAX_SHOWN} more" if len(uris) > _MAX_SHOWN else ""
    return ", ".join(repr(uri[:120]) for uri in uris[:_MAX_SHOWN]) + rest
