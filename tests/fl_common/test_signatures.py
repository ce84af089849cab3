"""Signatures hold for one signer, one purpose and one digest, and a key's file is its owner's alone."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fl_common.settings import SettingsError
from fl_common.signatures import SIGNATURE_BYTES, WrongSignature, check_signer, make_key, read_key, verify

DIGEST = "sha256:" + "9f" * 32


def test_key_that_is_read_again_signs_for_the_same_signer(tmp_path: Path) -> None:
    """The file has the whole key, and only its owner may read it."""
    made = make_key(tmp_path / "key.pem")
    again = read_key(tmp_path / "key.pem", "--key")
    signature = again.sign("package", DIGEST)
    assert again.signer == made.signer == check_signer(made.signer)
    assert len(signature) == SIGNATURE_BYTES
    assert stat.S_IMODE((tmp_path / "key.pem").stat().st_mode) == 0o600
    verify(made.signer, "package", DIGEST, signature)


def test_signature_holds_for_nothing_else(tmp_path: Path) -> None:
    """Another purpose, digest, signer or byte is refused, also where two parts are divided elsewhere."""
    key, other = make_key(tmp_path / "key.pem"), make_key(tmp_path / "other.pem")
    signature = key.sign("package", DIGEST)
    changed = bytes([signature[0] ^ 1]) + signature[1:]
    for signer, purpose, digest, given in (
        (other.signer, "package", DIGEST, signature),
        (key.signer, "release", DIGEST, signature),
        (key.signer, "package", DIGEST[:-1] + "0", signature),
        (key.signer, "packages", DIGEST[1:], signature),
        (key.signer, "package", DIGEST, changed),
        (key.signer, "package", DIGEST, b""),
    ):
        with pytest.raises(WrongSignature, match=digest):
            verify(signer, purpose, digest, given)
    with pytest.raises(ValueError, match="zero bytes"):
        key.sign("package\0", DIGEST)


def test_key_is_never_written_over(tmp_path: Path) -> None:
    """A second key under the same name is refused, and the first stays."""
    first = make_key(tmp_path / "key.pem")
    with pytest.raises(SettingsError, match="exists"):
        make_key(tmp_path / "key.pem")
    assert read_key(tmp_path / "key.pem", "--key").signer == first.signer


def test_files_that_are_no_key_are_refused(tmp_path: Path) -> None:
    """The message names the setting: no file, no PEM, another kind of key, a key that others can read."""
    path = tmp_path / "key.pem"
    with pytest.raises(SettingsError, match="--key: .* cannot be read"):
        read_key(path, "--key")
    path.write_text("no key")
    with pytest.raises(SettingsError, match="--key: expected a private key in PEM"):
        read_key(path, "--key")
    other_kind = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(other_kind.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(SettingsError, match="expected an Ed25519 key"):
        read_key(path, "--key")
    make_key(tmp_path / "open.pem")
    (tmp_path / "open.pem").chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        read_key(tmp_path / "open.pem", "--key")


@pytest.mark.parametrize("text", ["", "ed25519:", "ed25519:" + "A" * 64, "rsa:" + "a" * 64, "ed25519:" + "a" * 63])
def test_signers_that_are_none_are_refused(text: str) -> None:
    """A signer is its whole public key in lower case."""
    with pytest.raises(ValueError, match="expected a signer such as"):
        check_signer(text)
