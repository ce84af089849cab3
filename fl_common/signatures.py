"""Ed25519 signatures by which a site or a device knows who made what it is sent: a package of code, a released model.

A signer is named by its public key, `ed25519:` and 64 hexadecimal digits. A fingerprint would be as long, and a
signature could not be checked with it alone. What is signed is a digest and a purpose, so that a signature for one
purpose is none for another. The private key is a PEM file (PKCS 8) that only its owner can read.

    key = make_key(Path("release.pem"))
    signature = key.sign("package", "sha256:9f86...")
    verify(key.signer, "package", "sha256:9f86...", signature)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from fl_common.files import atomic_writer, check_private_key
from fl_common.settings import SettingsError

SIGNATURE_BYTES = 64
_SIGNER = re.compile(r"ed25519:([0-9a-f]{64})")
_CONTEXT = b"impetus signature 1"
"""Begins each signed message, so that a signature by the same key for another system is none here."""


class WrongSignature(Exception):
    """The signature is not the signer's for this digest and purpose."""


@dataclass(frozen=True)
class SigningKey:
    """A private key. `make_key` makes one, `read_key` reads it again."""

    _private: Ed25519PrivateKey

    @property
    def signer(self) -> str:
        """The name of the key: its public half as text."""
        return f"ed25519:{self._private.public_key().public_bytes_raw().hex()}"

    def sign(self, purpose: str, digest: str) -> bytes:
        """The signature of a digest for a purpose, 64 bytes. digest: with its algorithm, such as "sha256:9f86..."."""
        return self._private.sign(_message(purpose, digest))


def make_key(path: Path) -> SigningKey:
    """Make a key and write it to a file with mode 0600.

    Raises:
        SettingsError: the file exists, or cannot be written. A key that is replaced could sign nothing any more.
    """
    private = Ed25519PrivateKey.generate()
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        with atomic_writer(path, replace=False) as file:
            file.write(pem)
    except FileExistsError:
        raise SettingsError(f"expected the path of a new key, got {path}, which exists: choose another name") from None
    except OSError as error:
        raise SettingsError(f"the key cannot be written to {path}: {error.strerror}") from None
    return SigningKey(private)


def read_key(path: Path, setting: str) -> SigningKey:
    """The key of a file. setting: names the file in messages, such as "--key".

    Raises:
        SettingsError: the file cannot be read, is no Ed25519 key in PEM, or can be read by others.
    """
    try:
        private = load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise SettingsError(f"{setting}: {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingsError(f"{setting}: expected a private key in PEM without password in {path}: {error}") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise SettingsError(f"{setting}: expected an Ed25519 key in {path}, got {type(private).__name__}")
    check_private_key(path, setting)
    return SigningKey(private)


def check_signer(text: str) -> str:
    """The name of a signer, unchanged. Raises ValueError unless it is one."""
    if not _SIGNER.fullmatch(text):
        raise ValueError(f"expected a signer such as ed25519:{'0' * 8}... with 64 lower-case hex digits, got {text!r}")
    return text


def verify(signer: str, purpose: str, digest: str, signature: bytes) -> None:
    """Check that a signer signed this digest for this purpose.

    Raises:
        WrongSignature: it did not.
        ValueError: the signer's name is none.
    """
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(check_signer(signer).partition(":")[2]))
    try:
        public.verify(signature, _message(purpose, digest))
    except InvalidSignature:
        raise WrongSignature(
            f"expected a signature by {signer} of {digest} for the purpose {purpose}, got another one"
        ) from None


def _message(purpose: str, digest: str) -> bytes:
    """What is signed. A zero byte ends each part, so that no two pairs give the same message."""
    if "\0" in purpose + digest:
        raise ValueError("expected a purpose and a digest without zero bytes")
    return b"\0".join([_CONTEXT, purpose.encode(), digest.encode()])
