"""Whom a certificate is for: one URI in its subject alternative name, fl://ROLE/NAME. Every end reads it here.

Only the kind URI counts. The text of a DNS name or a mail address may look the same, and an authority that checks
such names checks something else. A certificate with two URIs has no holder: which of them counts would be a guess.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cryptography import x509

from protos.wire import ID_PATTERN

ROLES = ("server", "client", "admin")
"""What a holder can be."""
SCHEME = "fl"
_URI = re.compile(rf"{SCHEME}://({'|'.join(ROLES)})/({ID_PATTERN.pattern})")
_SHOWN_NAMES = 8


class NoHolder(ValueError):
    """The certificate does not state exactly one holder; the message says what was expected and what came."""


@dataclass(frozen=True, slots=True)
class Holder:
    """What a certificate's URI states."""

    role: str
    """One of ROLES."""
    name: str

    @property
    def uri(self) -> str:
        """As it stands in the certificate."""
        return f"{SCHEME}://{self.role}/{self.name}"


def parse_uri(uri: str) -> Holder:
    """The holder that a URI names. Raises NoHolder for anything but fl://ROLE/NAME, character by character.

    No other scheme, no user, port, query, fragment or further path, no percent-encoding, no control characters: names
    are made of the characters of an id, and everything else is refused instead of being normalized.
    """
    found = _URI.fullmatch(uri)
    if found is None:
        raise NoHolder(f"expected fl://ROLE/NAME with a role of {', '.join(ROLES)}, got {uri[:120]!r}")
    return Holder(found[1], found[2])


def holder_of(certificate: x509.Certificate) -> Holder:
    """The holder of a leaf. Raises NoHolder unless its alternative names have exactly one URI, and that names one."""
    uris = uris_of(certificate)
    if len(uris) != 1:
        raise NoHolder(f"expected a certificate with one URI fl://ROLE/NAME, got {_shown(uris)}")
    return parse_uri(uris[0])


def uris_of(certificate: x509.Certificate) -> list[str]:
    """All URIs among the alternative names. Raises NoHolder for names that cannot be read."""
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
    rest = f" and {len(uris) - _SHOWN_NAMES} more" if len(uris) > _SHOWN_NAMES else ""
    return ", ".join(repr(uri[:120]) for uri in uris[:_SHOWN_NAMES]) + rest
