"""Credentials of the listening ports, from files that may be renewed while the coordinator serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import cast

import grpc
import structlog

from fl_server.config import TlsConfig
from fl_server.metrics import Metrics
from protos.pem import Look, Pem, PemFiles, Watched

log = structlog.get_logger()

LOOK_S = 2.0
"""Between two looks at the files. What is new is used after the second that finds it."""


class Certificates:
    """The coordinator's certificate, and who signs its callers'. Connections that are open stay as they are."""

    def __init__(self, tls: TlsConfig, metrics: Metrics) -> None:
        """Read the files. Raises SettingsError for unusable ones."""
        self._files = Watched(PemFiles(tls.cert, tls.key, tls.client_ca, "client_ca"))
        self._metrics = metrics
        self._warned: Pem | None = None
        self._tell()

    def credentials(self, began: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
        """For one port: TLS, with client certificates required where a CA for them is named.

        began: called at each handshake, in a thread of its own.
        """
        shown = [self._files.pem]

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """Asked by grpc before each handshake, in a thread of its own; None: as before."""
            began()
            if (pem := self._files.pem) is shown[0]:
                return None
            shown[0] = pem
            return _configuration(pem)

        needed = self._files.pem.ca is not None
        # None is what grpc documents and its types forget.
        asked = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewed)
        return grpc.dynamic_ssl_server_credentials(_configuration(shown[0]), asked, needed)

    async def watch(self) -> None:
        """Look at the files for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            match await asyncio.to_thread(self._files.look):
                case Look.RENEWED:
                    log.info("certificates_renewed", serial=f"{self._files.pem.leaf.serial_number:x}")
                case Look.UNUSABLE:
                    log.warning("certificates_not_used", reason=self._files.trouble, todo="the earlier ones are shown")
            self._tell()

    def _tell(self) -> None:
        pem = self._files.pem
        if pem is self._warned:
            return
        for file, end in pem.ends().items():
            self._metrics.certificate_expiry.labels(file).set(end)
        if pem.ending(datetime.now(UTC)):
            self._warned = pem
            log.warning("certificate_ends_soon", not_after=pem.leaf.not_valid_after_utc.isoformat())


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.ca)
