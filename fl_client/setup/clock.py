"""Whether the device's clock can be right: a board without a battery wakes up in 1970, and no certificate is valid."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from fl_client.config import ClientConfig
from fl_client.setup.certificates import read
from fl_client.setup.findings import Finding, fail, ok


def look(config: ClientConfig) -> Finding:
    """The clock against what it cannot be earlier than: this program's files, the device's certificate, its CA's."""
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
            "set the clock: sudo timedatectl set-ntp true, and look with timedatectl whether it is synchronized",
        )
    return ok("clock", f"{now:%Y-%m-%d %H:%M} UTC, no earlier than it can be")
