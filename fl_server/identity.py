"""The caller of the current call: the role and name in its certificate, or in its token.

A certificate names its holder by one URI in its subject alternative name: fl://client/edge-3, fl://admin/alice. The
whole certificate is read, because the transport mixes names of all kinds. Without TLS there is no identity, and names
are as claimed.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from urllib.parse import unquote

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fl_common.certificates.leaf import issuer_key_id
from fl_common.certificates.names import NoHolder, holder_of, read_certificate
from fl_server.errors import CertificateEnded, Forbidden

_KNOWN = 4096
"""Certificates whose content is cached: reading one takes 0.1 ms, which is too long for each call."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The content of a verified certificate or token."""

    role: str
    """One of ROLES in `fl_common/certificates/names.py`, of several the one that allows most; "anybody" without one."""
    name: str
    ends: float | None = field(default=None, compare=False)
    """End of the certificate or token in Unix seconds; None: there is none."""
    begins: float = field(default=0.0, compare=False)
    """Begin of the certificate in Unix seconds."""
    serial: str = field(default="", compare=False)
    """The certificate's serial number in hex."""
    key: str = field(default="", compare=False)
    """SHA-256 of the certificate's public key (SubjectPublicKeyInfo, DER) in hex."""
    issuer: str = field(default="", compare=False)
    """Id of the key that signed the certificate, in hex; empty: unknown."""
    source: str = field(default="certificate", compare=False)
    """"certificate", "token" or "none"."""
    roles: frozenset[str] = field(default=frozenset(), compare=False)
    """All roles. A certificate has one, a token may have several."""

    def __post_init__(self) -> None:
        if not self.roles:
            object.__setattr__(self, "roles", frozenset({self.role}))

    def __str__(self) -> str:
        return f"{self.role}:{self.name}"

    def ended(self) -> CertificateEnded:
        """The error after the end."""
        return CertificateEnded(str(self), self.ends or 0.0, self.source)

    def check_time(self) -> None:
        """Raise CertificateEnded if the certificate or token has expired since its call or connection was opened."""
        if self.ends is not None and time.time() >= self.ends:
            raise self.ended()


ANYBODY = Identity("anybody", "", source="none")
"""The caller of a connection without certificates and tokens."""

caller: ContextVar[Identity] = ContextVar("caller", default=ANYBODY)
"""The identity of the current call's caller."""
address: ContextVar[str] = ContextVar("address", default="")
"""The address of the current call's caller, host:port; with a proxy, the address of the last one."""

_known: OrderedDict[bytes, Identity | NoHolder] = OrderedDict()
"""Identities by the digest of the certificate, the least recently used first."""


def of_connection(auth: Mapping[str, Iterable[bytes]]) -> Identity:
    """The caller of a connection. Raises Forbidden for a certificate without a holder."""
    pem = b"".join(auth.get("x509_pem_cert", ()))
    if b"ssl" not in auth.get("transport_security_type", ()) or not pem:
        return ANYBODY
    return of_certificate(pem)


def of_certificate(pem: bytes) -> Identity:
    """The holder of a certificate. Raises Forbidden if it has none."""
    holder = _read(pem)
    if isinstance(holder, NoHolder):
        raise Forbidden(
            "a certificate without an fl:// name", f"a certificate made by `fl ca issue`, or one like it: {holder}"
        )
    return holder


def _read(pem: bytes) -> Identity | NoHolder:
    """A certificate's content, from the cache or read once."""
    digest = hashlib.sha256(pem).digest()
    known = _known.get(digest)
    if known is None:
        known = _known[digest] = _identity_in(pem)
        while len(_known) > _KNOWN:
            _known.popitem(last=False)
    else:
        _known.move_to_end(digest)
    return known


def _identity_in(pem: bytes) -> Identity | NoHolder:
    try:
        leaf = read_certificate(pem)
        holder = holder_of(leaf)
        begins, ends = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
        key = leaf.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except NoHolder as none:
        return none
    except (ValueError, UnsupportedAlgorithm) as error:
        return NoHolder(f"expected a certificate that can be read, got another: {error}")
    serial = f"{leaf.serial_number:x}"
    digest = hashlib.sha256(key).hexdigest()
    return Identity(holder.role, holder.name, ends, begins, serial, digest, issuer_key_id(leaf))


def address_of(peer: str) -> str:
    """host:port of the transport's peer: "ipv4:192.0.2.7:5000", "ipv6:%5B2001:db8::7%5D:5000"."""
    kind, _, rest = peer.partition(":")
    return unquote(rest) if kind in {"ipv4", "ipv6"} else peer


def require_name(client_id: str) -> None:
    """Raise Forbidden if the caller's certificate has another client's name."""
    who = caller.get()
    if who is not ANYBODY and who.name != client_id:
        raise Forbidden(
            str(who), f"a certificate with the name {client_id!r}, or client_id = {who.name!r} in the client"
        )


def actor() -> str:
    """The caller's name in history rows."""
    who = caller.get()
    return "admin" if who is ANYBODY else str(who)
