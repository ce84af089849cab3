"""One end's PEM files: read as a whole, checked, and looked at again while the process runs.

Whoever renews certificates writes one file after the other, or in the middle of our reading. So what is new is used
only when it was found unchanged once more, and all of it fits together; until then what was used before stays in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from protos.private_files import check_private_key
from protos.settings import SettingsError

_BEGIN = b"-----BEGIN CERTIFICATE-----"
_LAST_SHARE = 0.25
"""Renewal is usual when a third of the time is left: with less than this, nobody has renewed."""

Check = Callable[["Pem"], None]
"""Raises SettingsError for what must not be used."""


@dataclass(frozen=True, slots=True)
class Pem:
    """Contents of the files of one end, which fit together."""

    cert: bytes
    """Its certificate, with those between it and the authority behind it."""
    key: bytes
    ca: bytes | None
    """Authorities that may have signed the other end's certificate; None where none is asked for."""

    @property
    def leaf(self) -> x509.Certificate:
        """The end's own certificate."""
        return x509.load_pem_x509_certificate(self.cert)

    def ends(self) -> dict[str, float]:
        """When they are no longer valid, in seconds since the epoch: the chain's first end, the bundle's last."""
        ends = {"cert": min(map(_end, x509.load_pem_x509_certificates(self.cert)))}
        if self.ca is not None:
            ends["ca"] = max(map(_end, x509.load_pem_x509_certificates(self.ca)))
        return ends

    def ending(self, now: datetime) -> bool:
        """Whether so little of the certificate's time is left that its renewal seems to have been forgotten."""
        leaf = self.leaf
        whole = leaf.not_valid_after_utc - leaf.not_valid_before_utc
        return leaf.not_valid_after_utc - now < whole * _LAST_SHARE


@dataclass(frozen=True, slots=True)
class PemFiles:
    """Where the files of one end lie."""

    cert: Path
    key: Path
    ca: Path | None
    ca_setting: str = "ca"

    def read(self) -> Pem:
        """Contents as they are now, checked. Raises SettingsError, by setting and path."""
        pem = self.contents()
        self.check(pem)
        return pem

    def contents(self) -> Pem:
        """Contents as they are now. Raises SettingsError for a file that cannot be read or is not PEM.

        And for a private key that others can read.
        """
        ca = None if self.ca is None else _read(self.ca, self.ca_setting)
        pem = Pem(_read(self.cert, "cert"), _read(self.key, "key"), ca)
        check_private_key(self.key, "tls.key")
        return pem

    def check(self, pem: Pem) -> None:
        """Raises SettingsError unless certificate and key belong together, and every certificate is whole."""
        leaf = _certificates(pem.cert, self.cert, "cert")[0]
        if pem.ca is not None and self.ca is not None:
            _certificates(pem.ca, self.ca, self.ca_setting)
        try:
            own = load_pem_private_key(pem.key, password=None).public_key() == leaf.public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise SettingsError(f"tls.key: expected a private key without password in {self.key}: {error}") from None
        if not own:
            raise SettingsError(f"tls.key: expected the private key of {self.cert}, got another in {self.key}")


class Look(Enum):
    """What a look at the files has brought."""

    SAME = "same"
    RENEWED = "renewed"
    UNUSABLE = "unusable"


class Watched:
    """The files of one end, and what of them is in use. For one thread at a time; `pem` may be read from any."""

    def __init__(self, files: PemFiles, check: Check = lambda pem: None) -> None:
        """Read them. Raises SettingsError."""
        self._files, self._also = files, check
        self.pem = files.read()
        check(self.pem)
        self.trouble = ""
        """Why what lies in the files is not in use; empty when it is."""
        self._seen: Pem | None = None

    def look(self, *, at_once: bool = False) -> Look:
        """Read them again. What is new is used if it was there at the last look too, or `at_once`.

        UNUSABLE is answered once for each reason.
        """
        try:
            pem = self._files.contents()
            if pem == self.pem:
                self.trouble = ""
                return Look.SAME
            seen, self._seen = self._seen, pem
            if pem != seen and not at_once:
                return Look.SAME
            self._check(pem)
        except SettingsError as error:
            if str(error) == self.trouble:
                return Look.SAME
            self.trouble = str(error)
            return Look.UNUSABLE
        self.pem, self.trouble = pem, ""
        return Look.RENEWED

    def _check(self, pem: Pem) -> None:
        self._files.check(pem)
        leaf, now = pem.leaf, datetime.now(UTC)
        if not leaf.not_valid_before_utc <= now < leaf.not_valid_after_utc:
            span = f"{leaf.not_valid_before_utc:%Y-%m-%d %H:%M} to {leaf.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
            raise SettingsError(f"tls.cert: expected a certificate that is valid now, got one from {span}")
        self._also(pem)


def _end(certificate: x509.Certificate) -> float:
    return certificate.not_valid_after_utc.timestamp()


def _read(path: Path, setting: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"tls.{setting}: {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN" not in content:
        raise SettingsError(f"tls.{setting}: expected a PEM file, got {path} without any -----BEGIN line")
    return content


def _certificates(pem: bytes, path: Path, setting: str) -> list[x509.Certificate]:
    """All certificates of a file, at least one, none cut short."""
    try:
        found = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise SettingsError(f"tls.{setting}: expected certificates in PEM in {path}: {error}") from None
    if len(found) != pem.count(_BEGIN):
        raise SettingsError(f"tls.{setting}: expected whole certificates in {path}, got one that is cut short")
    return found
