"""This device's certificate and its trusted CAs, read from files that may be renewed while the daemon runs."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from datetime import UTC, datetime

import structlog

from fl_client.connection.link import RetryDelays
from fl_client.errors import ConfigError, InvalidCertificate, TransportError
from fl_client.monitoring.metrics import Metrics
from fl_client.settings.config import TlsConfig
from fl_client.settings.identity import check_name
from fl_common.certificates.pem import Pem, PemChange, PemFiles, PemWatcher, invalid_now
from fl_common.certificates.tls_version import check_oldest_tls
from fl_common.settings import SettingsError

log = structlog.get_logger()

WARN_AGAIN_S = 86_400.0
"""Seconds between two warnings of one certificate's end."""


class Certificates:
    """The files for new connections, as they were when they last belonged together and to this device."""

    def __init__(self, tls: TlsConfig, client_id: str, metrics: Metrics, delays: RetryDelays) -> None:
        """Read the files. Raises ConfigError for unusable ones."""
        check_oldest_tls(tls.min_version)
        try:
            self._files = PemWatcher(PemFiles(tls.cert, tls.key, tls.ca), lambda pem: check_name(pem, client_id))
        except SettingsError as error:
            raise ConfigError(str(error)) from None
        self._metrics, self._delays = metrics, delays
        self._tls, self._client_id = tls, client_id
        self._used: Pem | None = None
        """The files of the last connection."""
        self._replaced = asyncio.Event()
        self._warned: tuple[Pem, str] | None = None
        """The certificate and the event of the last warning."""
        self._warned_at = 0.0
        self._show_expiry()

    @property
    def pem(self) -> Pem:
        """The newest usable files that were read."""
        return self._files.pem

    def current(self) -> Pem:
        """The files for a connection that is made now: the newest usable ones."""
        self._check(at_once=True)
        self._used = self._files.pem
        return self._used

    def replaced(self) -> None:
        """This daemon itself has replaced the files, completely: read them now."""
        self._check(at_once=True)
        self._replaced.set()

    def explained(self, error: TransportError) -> TransportError:
        """The error of a connection. InvalidCertificate if this device's own certificate is not valid now.

        A coordinator's refusal of a certificate looks like a closed connection, and its clock decides. So the daemon
        tries with any certificate, and reads the dates only when the connection has failed.
        """
        leaf, now = self._files.pem.leaf, datetime.now(UTC)
        if (invalid := invalid_now(leaf, now)) is None:
            return error
        ended = now >= leaf.not_valid_after_utc
        message = f"this device's certificate {self._tls.cert} {invalid} ({error})"
        return InvalidCertificate(message, self._renewal if ended else _CLOCK, ended=ended)

    @property
    def _renewal(self) -> str:
        """How the owner renews the certificate, or gets a new one."""
        if self._tls.renew:
            return (
                "this daemon asks for a new one by itself; if it gets none, renewal_failed or renewal_refused has the"
                f" reason: with a token of `fl enroll create --name {self._client_id}`, `fl-client init` gets a new"
                " one, and this daemon uses it without a restart"
            )
        return (
            f"renew it: `fl ca renew client-{self._client_id}` at the authority, then copy certificate and key to"
            f" {self._tls.cert} and {self._tls.key}; this daemon uses them without a restart"
        )

    async def renewed(self) -> None:
        """Wait until the files differ from those of the last connection."""
        before = self._used or self._files.pem
        while self._files.pem is before:
            # The jitter keeps the devices of a site from reconnecting at once.
            wait = self._delays.certificate_check * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._replaced.wait()
            self._replaced.clear()
            self._check(at_once=False)

    def _check(self, *, at_once: bool) -> None:
        match self._files.poll(at_once=at_once):
            case PemChange.RENEWED:
                log.info("certificates_renewed", serial=f"{self._files.pem.leaf.serial_number:x}")
                self._show_expiry()
            case PemChange.UNUSABLE:
                log.warning("certificates_not_used", reason=self._files.problem, todo="the earlier ones stay in use")
        self._warn()

    def _show_expiry(self) -> None:
        self._metrics.certificates.show(self._files.pem.periods())
        self._warn()

    def _warn(self) -> None:
        pem, now = self._files.pem, datetime.now(UTC)
        if not pem.ending(now) or (self._tls.renew and now < pem.leaf.not_valid_after_utc):
            return  # a daemon that renews logs its failures
        warning = pem, "certificate_ends_soon" if now < pem.leaf.not_valid_after_utc else "certificate_ended"
        if warning == self._warned and time.monotonic() < self._warned_at + WARN_AGAIN_S:
            return
        self._warned, self._warned_at = warning, time.monotonic()
        log.warning(warning[1], not_after=pem.leaf.not_valid_after_utc.isoformat(), todo=self._renewal)


_CLOCK = "check the clock of this device: timedatectl; this daemon retries meanwhile"
