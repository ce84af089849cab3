"""The oldest TLS version of this process's gRPC connections: 1.3, or 1.2 if a setting allows it by name.

gRPC's Python API has no setting for the version, and its core offers both. But it reads GRPC_SSL_CIPHER_SUITES, which
replaces the cipher suites of TLS 1.2 and has no effect on those of TLS 1.3. The one suite used here needs a pre-shared
key, which gRPC never has. So a handshake with TLS 1.2 finds no suite in common, as client and as server. The core reads
the variable when grpc is imported.
"""

from __future__ import annotations

import os
import sys
from typing import Literal

TlsVersion = Literal["1.2", "1.3"]
VARIABLE = "GRPC_SSL_CIPHER_SUITES"
NO_TLS_1_2 = "ECDHE-PSK-CHACHA20-POLY1305"
"""A suite of TLS 1.2 that no connection of gRPC can use."""
_only_1_3 = False


def set_oldest_tls(version: TlsVersion) -> None:
    """Set the version for all gRPC connections of this process. Raises RuntimeError if grpc is imported already."""
    global _only_1_3  # noqa: PLW0603 - as the variable, it belongs to the process
    if (version == "1.3") == _only_1_3:
        return
    if "grpc" in sys.modules:
        raise RuntimeError(f"expected set_oldest_tls({version!r}) before grpc is imported, got it afterwards")
    _only_1_3 = version == "1.3"
    if _only_1_3:
        os.environ[VARIABLE] = NO_TLS_1_2
    else:
        del os.environ[VARIABLE]


def check_oldest_tls(version: TlsVersion) -> None:
    """Raise RuntimeError if TLS 1.3 is expected and this process accepts TLS 1.2 too."""
    if version == "1.3" and not _only_1_3:
        raise RuntimeError("expected set_oldest_tls('1.3') before grpc was imported: TLS 1.2 would be accepted")
