"""The oldest TLS version of the command's connections. It imports little: it is asked before grpc is imported."""

from __future__ import annotations

from collections.abc import Mapping

from fl_common.certificates.tls_version import TlsVersion
from fl_ops.errors import UsageError

TLS_VARIABLE = "FL_TLS_MIN_VERSION"
"""Names the oldest TLS version. Only a variable, because grpc is imported before options and the file are read."""


def oldest_tls(environ: Mapping[str, str]) -> TlsVersion:
    """The oldest TLS version of this process: 1.3, or 1.2 if FL_TLS_MIN_VERSION has it. Raises UsageError."""
    match environ.get(TLS_VARIABLE, ""):
        case "" | "1.3":
            return "1.3"
        case "1.2":
            return "1.2"
        case other:
            raise UsageError(f"{TLS_VARIABLE}: expected 1.3, or 1.2 for a server without it, got {other!r}")
