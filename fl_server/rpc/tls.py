"""TLS credentials of the listening ports, from files that may be renewed while the coordinator runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import cast

import grpc
import structlog

from fl_common.certificates.pem import Pem, PemChange, PemFiles, PemWatcher
from fl_common.certificates.tls_version import check_oldest_tls
from fl_server.metrics import Metrics
from fl_server.security_config import TlsConfig

log = structlog.get_logger()

CHECK_S = 2.0
"""Period of the checks of the files. New content is used after the second check that finds it."""


class Certificates:
    """The coordinator's certificate and the CA of its callers. A renewal does not affect open connections."""

    def __init__(self, tls: TlsConfig, metrics: Metrics) -> None:
        """Read the files. Raises SettingsError if they cannot be used."""
        check_oldest_tls(tls.min_version)
        self._files = PemWatcher(PemFiles(tls.cert, tls.key, tls.client_ca, "client_ca"))
        self._metrics = metrics
        self._warned: Pem | None = None
        self._report_expiry()

    @property
    def pem(self) -> Pem:
        """The contents of the files in use. The same object as long as nothing has changed."""
        return self._files.pem

    def credentials(
        self,
        began: Callable[[], None] = lambda: None,
        presented: Callable[[], Pem] | None = None,
        *,
        asks_callers: bool = True,
    ) -> grpc.ServerCredentials:
        """Credentials of one port. Client certificates are required if a CA for them is set.

        began: called at each handshake, in a thread of its own. presented: what the port uses in place of the files;
        it returns the same object as long as nothing has changed. asks_callers: False for a port whose callers have no
        certificates.
        """
        current = presented or (lambda: self.pem)
        used = [current()]

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """grpc calls this before each handshake, in a thread of its own; None: no change."""
            began()
            if (pem := current()) is used[0]:
                return None
            used[0] = pem
            return _configuration(pem)

        needed = asks_callers and used[0].ca is not None
        # grpc documents None; its type stubs do not have it.
        asked = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewed)
        return grpc.dynamic_ssl_server_credentials(_configuration(used[0]), asked, needed)

    async def watch(
        self, poll_more: Callable[[], None] = lambda: None, polled: Callable[[], None] = lambda: None
    ) -> None:
        """Check the files periodically, without end.

        poll_more: checks other files, in a thread. polled: called on the event loop after each check.
        """
        while True:
            await asyncio.sleep(CHECK_S)
            await asyncio.to_thread(poll_more)
            match await asyncio.to_thread(self._files.poll):
                case PemChange.RENEWED:
                    log.info("certificates_renewed", serial=f"{self._files.pem.leaf.serial_number:x}")
                case PemChange.UNUSABLE:
                    log.warning(
                        "certificates_not_used", reason=self._files.problem, todo="the earlier ones stay in use"
                    )
            self._report_expiry()
            polled()

    def _report_expiry(self) -> None:
        pem = self._files.pem
        if pem is self._warned:
            return
        self._metrics.certificates.show(pem.periods())
        if pem.ending(datetime.now(UTC)):
            self._warned = pem
            log.warning("certificate_ends_soon", not_after=pem.leaf.not_valid_after_utc.isoformat())


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.ca)
