"""Certificates of the simulated processes: the same bytes in every life, so that signatures do not differ either.

Nothing here opens a connection with them. The daemons sign their keys for secure aggregation, and the coordinator and
the other daemons check these signatures.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from datetime import UTC, datetime
from functools import cache
from hashlib import blake2b
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_FROM, _TO = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)


def _key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(blake2b(name.encode(), digest_size=32).digest())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _certificate(name: str, extension: x509.ExtensionType) -> bytes:
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name("authority"))
        .public_key(_key(name).public_key())
        .serial_number(int.from_bytes(name.encode()[:16]))
        .not_valid_before(_FROM)
        .not_valid_after(_TO)
        .add_extension(extension, critical=True)
    )
    return builder.sign(_key("authority"), None).public_bytes(Encoding.PEM)


@cache
def _folder() -> Path:
    """Made once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="certificates-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "authority.crt").write_bytes(_certificate("authority", x509.BasicConstraints(ca=True, path_length=None)))
    return folder


@cache
def tls_of(role: str, name: str) -> dict[str, Path]:
    """The files cert and key of a process, and those of the authority of all."""
    folder = _folder()
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"fl://{role}/{name}")])
    cert.write_bytes(_certificate(name, names))
    key.write_bytes(_key(name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    key.chmod(0o600)
    return {"cert": cert, "key": key, "client_ca" if role == "server" else "ca": folder / "authority.crt"}
