"""This device's certificate and the CAs it trusts, from files that may be renewed while the daemon runs."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime

import structlog

from fl_client.config import TlsConfig
from fl_client.errors import ConfigError
from fl_client.identity import check_name
from fl_client.link import Waits
from fl_client.metrics import Metrics
from protos.pem import Look, Pem, PemFiles, Watched
from protos.settings import SettingsError

log = structlog.get_logger()


class Certificates:
    """What connections are made with: the files as they were when they last fitted together and were this device's."""

    def __init__(self, tls: TlsConfig, client_id: str, instruments: tuple[Metrics, Waits]) -> None:
        """Read the files. Raises ConfigError for unusable ones."""
        try:
            self._files = Watched(PemFiles(tls.cert, tls.key, tls.ca), lambda pem: check_name(pem, client_id))
        except SettingsError as error:
            raise ConfigError(str(error)) from None
        self._metrics, self._waits = instruments
        self._warned: Pem | None = None
        self._tell()

    def fresh(self) -> Pem:
        """For a connection that is made now: what lies there, if it is fit for use."""
        self._look(at_once=True)
        return self._files.pem

    async def renewed(self) -> None:
        """Wait until something else is to be used than at the last connection."""
        before = self._files.pem
        while self._files.pem is before:
            # Not all devices of a site in the same moment.
            await asyncio.sleep(self._waits.look * random.uniform(0.5, 1.0))  # noqa: S311 - jitter is no secret
            self._look(at_once=False)

    def _look(self, *, at_once: bool) -> None:
        match self._files.look(at_once=at_once):
            case Look.RENEWED:
                log.info("certificates_renewed", serial=f"{self._files.pem.leaf.serial_number:x}")
                self._tell()
            case Look.UNUSABLE:
                log.warning("certificates_not_used", reason=self._files.trouble, todo="the earlier ones are shown")
        self._warn()

    def _tell(self) -> None:
        for file, end in self._files.pem.ends().items():
            self._metrics.certificate_expiry.labels(file).set(end)
        self._warn()

    def _warn(self) -> None:
        pem = self._files.pem
        if pem is not self._warned and pem.ending(datetime.now(UTC)):
            self._warned = pem
            log.warning("certificate_ends_soon", not_after=pem.leaf.not_valid_after_utc.isoformat())
