"""The PEM files of one end of a connection: read, checked, and polled for renewal while the process runs.

A renewal writes the files one after the other, possibly while they are read. So new contents are used only after they
were found unchanged at a second poll and all of them fit together. Until then the old contents stay in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fl_common.certificates.leaf import Period, period_of
from fl_common.files import check_private_key
from fl_common.settings import BYTE_ORDER_MARK, SettingsError

_BEGIN = b"-----BEGIN CERTIFICATE-----"
_LAST_SHARE = 0.25
"""Certificates are usually renewed when a third of their time is left. Below this share, renewal has failed."""

Check = Callable[["Pem"], None]
"""Raises SettingsError for files that must not be used."""


def invalid_now(certificate: x509.Certificate, now: datetime) -> str | None:
    """Why a certificate is not valid at this time: "ended on 2026-11-01 10:00 UTC". None if it is valid."""
    if now >= certificate.not_valid_after_utc:
        return f"ended on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
    if now < certificate.not_valid_before_utc:
        return (
            f"is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and it is {now:%Y-%m-%d %H:%M}"
        )
    return None


def fingerprints(bundle: bytes) -> list[str]:
    """SHA-256 of each certificate of a bundle in PEM, in hex."""
    return [fingerprint(certificate) for certificate in x509.load_pem_x509_certificates(bundle)]


def fingerprint(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate in hex, as `openssl x509 -fingerprint -sha256` has it without the colons."""
    return certificate.fingerprint(hashes.SHA256()).hex()


@dataclass(frozen=True, slots=True)
class Pem:
    """The contents of one end's files."""

    cert: bytes
    """The end's certificate, followed by the intermediate ones."""
    key: bytes
    ca: bytes | None
    """Trusted authorities for the other end's certificate; None if that end needs no certificate."""

    @property
    def leaf(self) -> x509.Certificate:
        """The end's own certificate."""
        return _leaf(self.cert)

    def periods(self) -> dict[str, Period]:
        """When the files are valid: the first to end in the chain ("cert"), the last in the CA bundle ("ca")."""
        periods = {"cert": min(_periods(self.cert), key=_end)}
        if self.ca is not None:
            periods["ca"] = max(_periods(self.ca), key=_end)
        return periods

    def ending(self, now: datetime) -> bool:
        """Whether so little of the certificate's lifetime is left that its renewal has probably failed."""
        leaf = self.leaf
        lifetime = leaf.not_valid_after_utc - leaf.not_valid_before_utc
        return leaf.not_valid_after_utc - now < lifetime * _LAST_SHARE


@dataclass(frozen=True, slots=True)
class PemFiles:
    """Paths of the files of one end."""

    cert: Path
    key: Path
    ca: Path | None
    ca_setting: str = "ca"
    section: str = "tls"
    """The section of the settings, for messages."""
    stem: str = ""
    """What the names of the settings of certificate and key begin with: "ca_" for ca_cert and ca_key."""

    def read(self) -> Pem:
        """The current contents, checked. Raises SettingsError, which names setting and path."""
        pem = self.contents()
        self.check(pem)
        return pem

    def contents(self) -> Pem:
        """The current contents, unchecked.

        Raises:
            SettingsError: a file cannot be read or is not PEM, or others can read the private key.
        """
        ca = None if self.ca is None else _read(self.ca, f"{self.section}.{self.ca_setting}")
        pem = Pem(_read(self.cert, self._name("cert")), _read(self.key, self._name("key")), ca)
        check_private_key(self.key, self._name("key"))
        return pem

    def check(self, pem: Pem) -> None:
        """Raises SettingsError unless certificate and key belong together and every certificate is complete."""
        leaf, key = _certificates(pem.cert, self.cert, self._name("cert"))[0], self._name("key")
        if pem.ca is not None and self.ca is not None:
            _certificates(pem.ca, self.ca, f"{self.section}.{self.ca_setting}")
        try:
            own = load_pem_private_key(pem.key, password=None).public_key() == leaf.public_key()
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise SettingsError(f"{key}: expected a private key without password in {self.key}: {error}") from None
        if not own:
            raise SettingsError(f"{key}: expected the private key of {self.cert}, got another in {self.key}")

    def valid_now(self, pem: Pem) -> None:
        """Raises SettingsError unless the end's certificate is valid at this time."""
        if invalid := invalid_now(pem.leaf, datetime.now(UTC)):
            name = self._name("cert")
            raise SettingsError(f"{name}: expected a certificate that is valid now, got one that {invalid}")

    def _name(self, file: str) -> str:
        """The setting of certificate or key, with its section."""
        return f"{self.section}.{self.stem}{file}"


class PemChange(Enum):
    """The result of a poll."""

    SAME = "same"
    RENEWED = "renewed"
    UNUSABLE = "unusable"


class PemWatcher:
    """Holds the contents in use and polls the files for new ones. For one thread, but any thread may read `pem`."""

    def __init__(self, files: PemFiles, check: Check = lambda pem: None) -> None:
        """Read and check the files. Raises SettingsError. check: a further check of the contents."""
        self._files, self._further_check = files, check
        self.pem = files.read()
        check(self.pem)
        self.problem = ""
        """Why the contents of the files are not used; empty if they are."""
        self._previous: Pem | None = None

    def poll(self, *, at_once: bool = False) -> PemChange:
        """Read the files again. New contents are used if the previous poll found the same, or with `at_once`.

        UNUSABLE is returned once for each reason.
        """
        try:
            pem = self._files.contents()
            if pem == self.pem:
                self.problem = ""
                return PemChange.SAME
            previous, self._previous = self._previous, pem
            if pem != previous and not at_once:
                return PemChange.SAME
            self._check(pem)
        except SettingsError as error:
            if str(error) == self.problem:
                return PemChange.SAME
            self.problem = str(error)
            return PemChange.UNUSABLE
        self.pem, self.problem = pem, ""
        return PemChange.RENEWED

    def _check(self, pem: Pem) -> None:
        self._files.check(pem)
        self._files.valid_now(pem)
        self._further_check(pem)


@lru_cache(maxsize=8)
def _leaf(pem: bytes) -> x509.Certificate:
    """The first certificate of a file. It is asked for at each poll, and parsed once."""
    return x509.load_pem_x509_certificate(pem)


def _periods(pem: bytes) -> list[Period]:
    return list(map(period_of, x509.load_pem_x509_certificates(pem)))


def _end(period: Period) -> datetime:
    return period.ends


def _read(path: Path, setting: str) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:  # read every few seconds: one buffer is enough
            content = file.readall().removeprefix(BYTE_ORDER_MARK)
    except OSError as error:
        raise SettingsError(f"{setting}: {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN" not in content:
        raise SettingsError(f"{setting}: expected a PEM file, got {path} without any -----BEGIN line")
    return content


def _certificates(pem: bytes, path: Path, setting: str) -> list[x509.Certificate]:
    """All certificates of a file: at least one, each complete."""
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise SettingsError(f"{setting}: expected certificates in PEM in {path}: {error}") from None
    if len(certificates) != pem.count(_BEGIN):
        raise SettingsError(f"{setting}: expected whole certificates in {path}, got one that is cut short")
    return certificates
