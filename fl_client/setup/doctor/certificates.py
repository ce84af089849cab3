"""Checks the device's certificate files: identity, validity, and whether they belong together."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from fl_client.enrollment.folder import CertificateFolder
from fl_client.errors import ConfigError
from fl_client.settings.config import ClientConfig, TlsConfig
from fl_client.settings.identity import identity_of
from fl_client.setup.doctor.findings import Finding, fail, ok, warn
from fl_common.certificates.names import read_certificate
from fl_common.certificates.pem import invalid_now
from fl_common.file_permissions import check_private_key
from fl_common.settings import SettingsError

SOON = timedelta(days=14)
"""A certificate that ends within this time gives a warning."""
ENROLL = "`fl-client init` with a new token, which the operator makes with `fl enroll create --name NAME`"
RENEW = "`fl ca issue client NAME --force` at the authority, then copy certificate and key here"


def read(path: Path) -> x509.Certificate | None:
    """The first certificate of a PEM file. None where there is none."""
    try:
        return read_certificate(path.read_bytes())
    except (OSError, ValueError):
        return None


def check(config: ClientConfig) -> list[Finding]:
    """Check identity, files, key, dates and use. Without TLS only the identity."""
    try:
        name = identity_of(config)
    except ConfigError as error:
        return [fail("identity", str(error))]
    if config.tls is None:
        message = f"{name}, by the settings: plain text, without certificates"
        if not config.insecure_remote:
            return [ok("identity", message)]
        return [warn("identity", message, "everyone on the network can read and change what is sent: add [tls]")]
    faults = _files(config.tls) or _dates(config.tls) + _use(config.tls.cert)
    return [ok("identity", f"{name}, by {config.tls.cert}"), *faults]


def _files(tls: TlsConfig) -> list[Finding]:
    """Failures that prevent the other checks."""
    certificate = x509.load_pem_x509_certificate(tls.cert.read_bytes())  # identity_of has read it
    if read(tls.ca) is None:
        return [fail("tls.ca", f"expected a certificate in PEM in {tls.ca}, got {_content(tls.ca)}", _COPY_CA)]
    try:
        key = serialization.load_pem_private_key(tls.key.read_bytes(), password=None)
    except OSError as error:
        fix = f"let the service's user read it: chgrp impetus {tls.key} && chmod 0640 {tls.key}"
        return [fail("tls.key", f"expected a private key that can be read, got {error}", fix)]
    except (ValueError, TypeError) as error:
        message = f"expected a private key in PEM without a password in {tls.key}, got other content ({error})"
        return [fail("tls.key", message, RENEW)]
    if key.public_key() != certificate.public_key():
        message = f"expected the private key of {tls.cert} in {tls.key}, got the key of another certificate"
        return [fail("tls.key", message, "copy certificate and key of the same `fl ca issue client`")]
    try:
        check_private_key(tls.key, "tls.key")
    except SettingsError as error:
        message = str(error).removeprefix("tls.key: ")
        return [fail("tls.key", message, f"chmod 600 {tls.key}"), *_dates(tls), *_use(tls.cert)]
    return []


def _dates(tls: TlsConfig) -> list[Finding]:
    certificate = read(tls.cert)
    if certificate is None:
        return []
    now, end = datetime.now(UTC), certificate.not_valid_after_utc
    renewal = ENROLL if tls.renew else RENEW
    if invalid := invalid_now(certificate, now):
        fix = renewal if now >= end else "set the clock: timedatectl shows whether it is synchronized"
        return [fail("tls.cert", f"expected a certificate that is valid now, got one that {invalid}", fix)]
    if tls.renew:
        return [_renewed_in_time(tls, now, end)]
    if end < now + SOON:
        return [warn("tls.cert", f"expected more than {SOON.days} days, got an end on {end:%Y-%m-%d}", renewal)]
    return [ok("tls.cert", f"valid until {end:%Y-%m-%d}")]


def _renewed_in_time(tls: TlsConfig, now: datetime, end: datetime) -> Finding:
    """A certificate that the daemon renews is late when half of the time between renewal and end is over."""
    due = datetime.fromtimestamp(CertificateFolder(tls.folder).renew_after(), UTC)
    until = f"valid until {end:%Y-%m-%d %H:%M} UTC"
    if now > due + (end - due) / 2:
        message = f"expected a renewal on {due:%Y-%m-%d %H:%M} UTC, got none: {until}"
        return warn("tls.cert", message, "start the daemon, or read renewal_failed in its log")
    return ok("tls.cert", f"{until}; the daemon renews it from {due:%Y-%m-%d %H:%M} UTC on")


def _use(path: Path) -> list[Finding]:
    """Check that a certificate with named uses has clientAuth among them."""
    certificate = read(path)
    try:
        uses = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) if certificate else []
    except x509.ExtensionNotFound:
        return []
    if ExtendedKeyUsageOID.CLIENT_AUTH in uses:
        return []
    named = ", ".join(use._name for use in uses)  # noqa: SLF001 - no public name exists
    return [fail("tls.cert", f"expected a certificate for clients (clientAuth), got one for {named}", RENEW)]


def _content(path: Path) -> str:
    try:
        return f"{len(path.read_bytes())} bytes that are no certificate"
    except OSError as error:
        return f"{error}"


_COPY_CA = "copy ca.crt of the authority that signed the coordinator's certificate"
