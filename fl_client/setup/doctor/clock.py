"""Checks whether the device's clock can be right. A board without a battery starts in 1970: no certificate is valid."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from fl_client.settings.config import ClientConfig
from fl_client.setup.doctor.certificates import read
from fl_client.setup.doctor.findings import Finding, fail, ok


def check(config: ClientConfig) -> Finding:
    """Compare the clock with the dates of this program's files, the device's certificate, and its CA's."""
    earliest = {"this program was installed": datetime.fromtimestamp(Path(__file__).stat().st_mtime, UTC)}
    if config.tls is not None:
        for path in (config.tls.ca, config.tls.cert):
            if certificate := read(path):
                earliest[f"{path} was made"] = certificate.not_valid_before_utc
    now = datetime.now(UTC)
    what, when = max(earliest.items(), key=lambda item: item[1])
    if now < when:
        return fail(
            "clock",
            f"expected a time after {when:%Y-%m-%d %H:%M} UTC, when {what}, got {now:%Y-%m-%d %H:%M} UTC",
            "set the clock: sudo timedatectl set-ntp true, and check with timedatectl that it is synchronized",
        )
    return ok("clock", f"{now:%Y-%m-%d %H:%M} UTC, plausible")
