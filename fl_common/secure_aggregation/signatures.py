"""Who signs for a client: the key of its certificate. Who says that the certificate is the client's: an authority.

An authority that the coordinator holds can make certificates of clients that do not exist. So clients know of the
coordinator only what it could not invent: see `Trust.protects`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from fl_common.certificates.names import NoHolder, holder_of
from fl_common.certificates.pem import invalid_now
from fl_common.secure_aggregation.errors import BadSignature

Key = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey
PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey
Holder = Literal["coordinator", "outside", "pinned"]

_PSS = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)
_MOST_CERTIFICATES = 4
_MOST_CERTIFICATE_BYTES = 16_384


@dataclass(frozen=True)
class Signer:
    """A client's certificate and its key."""

    key: PrivateKey
    chain: tuple[bytes, ...]
    """The certificate, then the intermediate ones, in DER."""

    @staticmethod
    def from_pem(chain: bytes, key: bytes) -> Signer:
        """The signer of a daemon's files. Raises ValueError for a key of another kind than EC, Ed25519 and RSA."""
        certificates = x509.load_pem_x509_certificates(chain)
        private = load_pem_private_key(key, password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey):
            raise ValueError(f"expected a key of the kind EC, Ed25519 or RSA, got {type(private).__name__}")
        return Signer(private, tuple(certificate.public_bytes(Encoding.DER) for certificate in certificates))

    def sign(self, message: bytes) -> bytes:
        """The signature of a message."""
        if isinstance(self.key, ec.EllipticCurvePrivateKey):
            return self.key.sign(message, ec.ECDSA(hashes.SHA256()))
        if isinstance(self.key, ed25519.Ed25519PrivateKey):
            return self.key.sign(message)
        return self.key.sign(message, _PSS, hashes.SHA256())


def check_signature(key: Key, signature: bytes, message: bytes) -> None:
    """Raises BadSignature unless the key's holder signed the message."""
    try:
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature, message)
        else:
            key.verify(signature, message, _PSS, hashes.SHA256())
    except InvalidSignature:
        raise BadSignature("expected a signature of the certificate's key, got another one") from None


@dataclass(frozen=True)
class Trust:
    """Whose certificates are trusted: those of authorities, or the keys that a site has listed."""

    holder: Holder
    """Who holds the authority's key: the coordinator, or somebody outside of it. Or the keys are pinned."""
    authorities: tuple[x509.Certificate, ...] = ()
    pins: Mapping[str, str] = field(default_factory=dict)
    """Client -> SHA-256 of its public key (SubjectPublicKeyInfo, DER) in hex."""

    @staticmethod
    def of_authorities(pem: bytes, holder: Literal["coordinator", "outside"]) -> Trust:
        """Trust in the authorities of a PEM file. Raises ValueError for anything else."""
        return Trust(holder, tuple(x509.load_pem_x509_certificates(pem)))

    @staticmethod
    def of_pins(pins: Mapping[str, str]) -> Trust:
        """Trust in the public keys of these clients alone."""
        return Trust("pinned", pins={client: digest.lower() for client, digest in pins.items()})

    @property
    def protects(self) -> bool:
        """Whether the coordinator cannot invent clients."""
        return self.holder != "coordinator"

    @property
    def statement(self) -> str:
        """One sentence for logs and pages."""
        return {
            "coordinator": "The coordinator holds the authority of the clients' certificates: it could invent clients"
            " and learn one update, so the sum is hidden from a curious coordinator only.",
            "outside": "The authority of the clients' certificates is outside of the coordinator: it cannot invent"
            " clients.",
            "pinned": "The other clients' keys are pinned at this site: the coordinator cannot invent clients.",
        }[self.holder]

    def check(self, client: str, chain: Sequence[bytes], now: datetime) -> Key:
        """The public key of a client. chain: its certificate, then intermediate ones, in DER.

        Raises BadSignature unless the certificate is the client's and is trusted.
        """
        try:
            leaf, *issuers = self._read(tuple(chain))
            key = _signing_key(leaf)
            if self.holder == "pinned":
                _check_pin(self.pins.get(client), key)
            else:
                self._check_holder(client, leaf)
                self._check_chain(leaf, issuers, now)
        except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion) as error:
            raise BadSignature(f"{client}: {error}") from None
        return key

    @staticmethod
    def _read(chain: tuple[bytes, ...]) -> list[x509.Certificate]:
        if not 0 < len(chain) <= _MOST_CERTIFICATES or max(map(len, chain)) > _MOST_CERTIFICATE_BYTES:
            raise ValueError(f"expected 1 to {_MOST_CERTIFICATES} certificates, got {len(chain)}, or too large ones")
        return [x509.load_der_x509_certificate(certificate) for certificate in chain]

    @staticmethod
    def _check_holder(client: str, leaf: x509.Certificate) -> None:
        try:
            holder = holder_of(leaf)
        except NoHolder as error:
            raise ValueError(str(error)) from None
        if (holder.role, holder.name) != ("client", client):
            raise ValueError(f"expected the certificate of this client, got that of {holder.uri}")

    def _check_chain(self, leaf: x509.Certificate, issuers: Sequence[x509.Certificate], now: datetime) -> None:
        """Raises ValueError unless an authority signed the last certificate, and each one signed the one before."""
        if invalid := invalid_now(leaf, now):
            raise ValueError(f"expected a certificate that is valid now, got one that {invalid}")
        signed = leaf
        for below, issuer in enumerate(issuers):
            if signed.issuer != issuer.subject or not _issued(signed, issuer, below, now):
                raise ValueError("expected a chain in which each certificate signed the one before")
            signed = issuer
        named = self._named.get(signed.issuer.public_bytes(), [])
        if not any(_issued(signed, authority, len(issuers), now) for authority in named):
            raise ValueError("expected a certificate of a trusted authority, got another one")

    @cached_property
    def _named(self) -> Mapping[bytes, list[x509.Certificate]]:
        named: dict[bytes, list[x509.Certificate]] = {}
        for authority in self.authorities:
            named.setdefault(authority.subject.public_bytes(), []).append(authority)
        return named


def key_of(certificate: bytes) -> Key:
    """The public key of a certificate in DER, whose trust was checked before."""
    return _signing_key(x509.load_der_x509_certificate(certificate))


def _signing_key(certificate: x509.Certificate) -> Key:
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey | rsa.RSAPublicKey):
        raise ValueError(f"expected a key of the kind EC, Ed25519 or RSA, got {type(key).__name__}")
    return key


def _check_pin(pin: str | None, key: Key) -> None:
    if pin is None:
        raise ValueError("expected a client whose key is pinned at this site, got another one")
    if pin != hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest():
        raise ValueError("expected the pinned key, got another one")


def _issued(signed: x509.Certificate, issuer: x509.Certificate, below: int, now: datetime) -> bool:
    """Whether a valid authority signed a certificate. below: the authorities between it and the client."""
    try:
        if invalid_now(issuer, now) or not _may_sign_clients(issuer, below):
            return False
        signed.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _may_sign_clients(issuer: x509.Certificate, below: int) -> bool:
    extensions = {type(extension.value): extension.value for extension in issuer.extensions}
    basic, usage = extensions.get(x509.BasicConstraints), extensions.get(x509.KeyUsage)
    if not isinstance(basic, x509.BasicConstraints) or not basic.ca:
        return False
    if basic.path_length is not None and basic.path_length < below:
        return False
    if isinstance(usage, x509.KeyUsage) and not usage.key_cert_sign:
        return False
    purposes = extensions.get(x509.ExtendedKeyUsage)
    if isinstance(purposes, x509.ExtendedKeyUsage) and ExtendedKeyUsageOID.CLIENT_AUTH not in purposes:
        return False
    names = extensions.get(x509.NameConstraints)
    return not isinstance(names, x509.NameConstraints) or _allows_clients(names)


def _allows_clients(names: x509.NameConstraints) -> bool:
    """Whether URIs with the host "client" are allowed: the host of fl://client/edge-3."""

    def hosts(subtrees: Sequence[x509.GeneralName] | None) -> set[str]:
        return {name.value for name in subtrees or () if isinstance(name, x509.UniformResourceIdentifier)}

    allowed, excluded = hosts(names.permitted_subtrees), hosts(names.excluded_subtrees)
    return "client" not in excluded and (not allowed or "client" in allowed)
