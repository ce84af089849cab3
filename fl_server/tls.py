"""Credentials of the listening ports, from the settings."""

from __future__ import annotations

from pathlib import Path

import grpc

from fl_server.config import TlsConfig
from protos.settings import SettingsError


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """TLS, with client certificates required where a CA for them is named. Raises SettingsError for unusable files."""
    roots = _read(tls.client_ca, "tls.client_ca") if tls.client_ca else None
    pair = (_read(tls.key, "tls.key"), _read(tls.cert, "tls.cert"))
    return grpc.ssl_server_credentials([pair], root_certificates=roots, require_client_auth=roots is not None)


def _read(path: Path, key: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{key}: {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN" not in content:
        raise SettingsError(f"{key}: expected a PEM file, got {path} without any -----BEGIN line")
    return content
