"""Certificates and their names: of a connection's caller, in files, and in requests for a certificate."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fl_client.errors import ConfigError
from fl_client.settings.identity import _certificate_name, check_name
from fl_common.certificates.names import NoHolder, parse_uri
from fl_common.certificates.pem import PemFiles
from fl_common.settings import SettingsError
from fl_server.errors import Forbidden
from fl_server.identity import address_of, of_connection
from tests.fuzz.parser import Parser
from tests.processes.certificates import Pki


def parsers(folder: Path, opened: ExitStack) -> Iterator[Parser]:
    """The readers of certificates, with PEM and with damaged DER inside well-formed PEM."""
    pki = Pki(folder / "pki")
    leaves = [pki.issue("client", "edge-1"), pki.issue("admin", "alice"), pki.issue("server", "coordinator")]
    texts = [leaf.cert.read_bytes() for leaf in leaves]
    binary = [x509.load_pem_x509_certificate(text).public_bytes(Encoding.DER) for text in texts]
    yield Parser("certificate.caller_der", binary, lambda raw: _caller(pem_of(raw)), (Forbidden,), weight=3)
    yield Parser("certificate.caller", texts, _caller, (Forbidden,))
    files = PemFiles(folder / "a.crt", folder / "a.key", folder / "ca.crt")
    files.key.touch(0o600)
    files.key.write_bytes(leaves[0].key.read_bytes())
    pki.ca.rename(folder / "ca.crt")

    def read(raw: bytes) -> None:
        files.cert.write_bytes(raw)
        pem = files.read()
        pem.periods()
        pem.ending(datetime.now(UTC))
        check_name(pem, "edge-1")

    yield Parser("certificate.files", texts[:1], read, (SettingsError,))
    yield Parser("certificate.files_der", binary[:1], lambda raw: read(pem_of(raw)), (SettingsError,), weight=2)

    def name(raw: bytes) -> None:
        files.cert.write_bytes(pem_of(raw))
        _certificate_name(files.cert)

    yield Parser("certificate.own_name", binary[:2], name, (ConfigError,))
    yield Parser("certificate.uri", ["fl://client/edge-1"], lambda raw: parse_uri(raw.decode("latin-1")), (NoHolder,))
    yield Parser("certificate.peer", [b"ipv4:192.0.2.7:5000", b"ipv6:%5B2001:db8::7%5D:5000"], _peer)


def pem_of(der: bytes) -> bytes:
    """The bytes as a certificate in PEM."""
    lines = base64.encodebytes(der).decode().replace("\n", "")
    return f"-----BEGIN CERTIFICATE-----\n{lines}\n-----END CERTIFICATE-----\n".encode()


def _caller(pem: bytes) -> None:
    of_connection({"transport_security_type": [b"ssl"], "x509_pem_cert": [pem]})


def _peer(raw: bytes) -> None:
    address_of(raw.decode("latin-1"))
