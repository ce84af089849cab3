"""A client's secrets of one secure aggregation, and the keys that two clients agree on.

Every secret follows from one string of 32 bytes, by HKDF (RFC 5869). So that string is all that a client must store to
answer again with the same bytes.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from functools import cached_property

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fl_common.privacy.secret_stream import derived
from fl_common.secure_aggregation.fields import digest_of, packed

KEY_BYTES = 32
_ANY = X25519PrivateKey.from_private_bytes(bytes(KEY_BYTES))
"""A key for trying whether another one has a low order. It needs no secrecy."""
_SINGLE_USE = bytes(12)
"""The nonce of a key that encrypts one message."""


@dataclass(frozen=True)
class Secrets:
    """The secrets of one client in one secure aggregation."""

    root: bytes
    """32 random bytes."""

    @cached_property
    def mask_key(self) -> bytes:
        """The private key from which masks with others follow. It is shared, and opened if the client drops out."""
        return derived(self.root, "mask key")

    @cached_property
    def share_key(self) -> bytes:
        """The private key for the encryption of shares. Nobody else ever has it."""
        return derived(self.root, "share key")

    @cached_property
    def self_mask(self) -> bytes:
        """The key of the client's own mask. It is shared, and opened if the client survives."""
        return derived(self.root, "self mask")

    @cached_property
    def coin(self) -> bytes:
        """The client's part in the order of the circle."""
        return derived(self.root, "coin")

    def coefficients(self, secret: str, threshold: int) -> list[bytes]:
        """Those of the polynomial of a secret, lowest power first."""
        return [derived(self.root, "coefficient", secret, power) for power in range(1, threshold)]


def public_key(private: bytes) -> bytes:
    """The public key of an X25519 private key: 32 bytes each."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def commitment(purpose: str, terms: bytes, client: str, secret: bytes) -> bytes:
    """A digest that binds a client to a random secret, and tells nothing of it."""
    return digest_of("commitment", purpose, terms, client, secret)


def agreed(private: bytes, public: bytes, terms: bytes, *purpose: str) -> bytes:
    """The key of 32 bytes that two clients agree on for a purpose under these terms.

    Raises ValueError for a public key of low order, with which the key would be known to everybody.
    """
    shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    return derived(hmac.digest(terms, shared, hashlib.sha256), *purpose)


def check_public_key(public: bytes) -> None:
    """Raises ValueError unless a key can be agreed on with this public key."""
    if len(public) != KEY_BYTES:
        raise ValueError(f"expected a public key of {KEY_BYTES} bytes, got {len(public)}")
    _ANY.exchange(X25519PublicKey.from_public_bytes(public))


def encrypted(key: bytes, plain: bytes, *context: bytes) -> bytes:
    """The text under a key that is used once; 16 bytes longer. context: what it belongs to, which is not encrypted."""
    return ChaCha20Poly1305(key).encrypt(_SINGLE_USE, plain, packed(*context))


def decrypted(key: bytes, text: bytes, *context: bytes) -> bytes:
    """The text of `encrypted`. Raises ValueError if the key or the context is another one, or the text was changed."""
    try:
        return ChaCha20Poly1305(key).decrypt(_SINGLE_USE, text, packed(*context))
    except InvalidTag:
        raise ValueError("expected a text for this client under these terms, got another one") from None
