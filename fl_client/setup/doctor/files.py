"""Checks of the files that the settings name: the state directory, the certificates and the site's policy."""

from __future__ import annotations

import getpass
import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from fl_client.enrollment.folder import CertificateFolder
from fl_client.errors import ConfigError, StateError
from fl_client.packages import landlock
from fl_client.policy.config import Policy, read_policy, trusted_certificates
from fl_client.privacy.files import AccountFiles
from fl_client.settings.config import ClientConfig, TlsConfig
from fl_client.settings.identity import identity_of
from fl_client.setup.doctor.findings import Finding, fail, ok, warn
from fl_client.storage.release_folder import ReleaseFolder
from fl_client.storage.state import RELEASES, check_writable
from fl_common.certificates.names import read_certificate
from fl_common.certificates.pem import invalid_now
from fl_common.files import check_private_key
from fl_common.settings import SettingsError, parse_json
from fl_common.units import counted

_LOCKS = Path("/proc/locks")


def check_state_directory(config: ClientConfig) -> Iterator[Finding]:
    """Check that it can be written, and that it belongs to this device."""
    folder = config.state_dir.absolute()
    place = nearest(folder)
    if (refusal := _refusal(place)) is not None:
        message = f"expected a directory that can be written, got {refusal}"
        fix = f"{USER}, or set another state_dir; is the disk full, or mounted read-only?"
        yield fail("state_dir", message, f"{fix} A running daemon takes no work until then, and needs no restart")
        return
    created = "" if place == folder else f", and will be created in {place}"
    yield _holder(folder) or ok("state_dir", f"{folder} can be written{created}")
    yield from _owner(config, folder)


def check_releases(config: ClientConfig) -> Iterator[Finding]:
    """Check the folders of released models and of the announcement, and the owner's program. None without releases."""
    if (releases := config.releases) is None:
        return
    folder = releases.folder or config.state_dir / RELEASES
    places = [folder] if releases.announce is None else [folder, releases.announce.parent]
    for place in places:
        if (refusal := _refusal(nearest(place.absolute()))) is not None:
            yield fail("releases", f"expected a folder that can be written, got {refusal}", USER)
            return
    if releases.hook and shutil.which(releases.hook[0]) is None:
        message = f"expected a program that can be run in releases.hook, got {releases.hook[0]!r}"
        yield fail("releases", message, "without it every version is taken back: repair the path, or chmod +x")
        return
    in_use = ", ".join(f"{model} {version}" for model, version in ReleaseFolder(folder).in_use().items()) or "none"
    keys = counted(len(releases.signers), "key")
    yield ok("releases", f"by {keys}, from version {releases.oldest} on, in {folder}; in use: {in_use}")


def check_packages(config: ClientConfig) -> Iterator[Finding]:
    """Check whether the kernel can hide the daemon's files from packages. None without packages."""
    if not any(served.package for served in config.served):
        return
    if known := landlock.version():
        yield ok("packages", f"the kernel hides the daemon's state and key from packages (Landlock {known})")
        return
    message = "expected a kernel with Landlock, got one without: a package can read what the daemon's user can"
    yield warn("packages", message, "Linux 5.13 or newer, with landlock in the kernel's line lsm=")


def nearest(folder: Path) -> Path:
    """The folder, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.parents) if _may_exist(path))


def _may_exist(folder: Path) -> bool:
    try:
        return folder.exists()
    except PermissionError:
        return True  # the write test reports the problem


def _refusal(place: Path) -> OSError | None:
    """The error of a durable write, or None."""
    try:
        check_writable(place)
    except OSError as error:
        return error
    return None


def _holder(folder: Path) -> Finding | None:
    """The holder of the lock. A running daemon is no failure.

    The check reads the kernel's list of locks. Taking the lock, even briefly, could prevent a daemon's start.
    """
    lock = folder / "lock"
    try:
        inode, holder = lock.stat().st_ino, lock.read_text(encoding="utf-8").strip() or "unknown"
        held = any(f":{inode} " in line for line in _LOCKS.read_text(encoding="utf-8").splitlines() if "FLOCK" in line)
    except FileNotFoundError:
        return None
    except OSError as error:
        return fail("state_dir", f"expected a lock that can be read, got {error}", USER)
    return ok("state_dir", f"{folder} is held by process {holder}: a daemon runs") if held else None


def _owner(config: ClientConfig, folder: Path) -> Iterator[Finding]:
    """Check that the directory belongs to this device and user."""
    try:
        kept = parse_json((folder / "identity.json").read_text(encoding="utf-8")).get("client_id")
        wanted = identity_of(config)
    except FileNotFoundError:
        return
    except ConfigError:
        return  # reported by the check of certificates
    except (OSError, ValueError, AttributeError) as error:
        yield fail("state_dir", f"expected a valid identity.json, got {error}", USER)
        return
    if kept != wanted:
        message = f"expected the directory of client {wanted!r}, got that of {kept!r}"
        yield fail("state_dir", message, "a state directory belongs to one device: set another")
    if folder.stat().st_uid != os.geteuid():
        message = f"expected a directory of the user {getpass.getuser()}, got one of the user id {folder.stat().st_uid}"
        yield warn("state_dir", message, USER)


USER = "run this as the service's user: sudo -u impetus fl-client doctor ..."


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


def check_certificates(config: ClientConfig) -> list[Finding]:
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
    certificate = x509.load_pem_x509_certificate(config.tls.cert.read_bytes())  # identity_of has read it
    faults = _files(config.tls, certificate) or _dates(config.tls, certificate) + _use(certificate)
    return [ok("identity", f"{name}, by {config.tls.cert}"), *faults]


def _files(tls: TlsConfig, certificate: x509.Certificate) -> list[Finding]:
    """Failures that prevent the other checks."""
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
        return [fail("tls.key", message, f"chmod 600 {tls.key}"), *_dates(tls, certificate), *_use(certificate)]
    return []


def _dates(tls: TlsConfig, certificate: x509.Certificate) -> list[Finding]:
    now, end = datetime.now(UTC), certificate.not_valid_after_utc
    renewal = ENROLL if tls.renew else RENEW
    if invalid := invalid_now(certificate, now):
        fix = renewal if now >= end else "set the clock: timedatectl shows whether it is synchronized"
        return [fail("tls.cert", f"expected a certificate that is valid now, got one that {invalid}", fix)]
    if tls.renew:
        return [_renewed_in_time(tls, now, end)]
    if end < now + SOON:
        return [
            warn("tls.cert", f"expected more than {counted(SOON.days, 'day')}, got an end on {end:%Y-%m-%d}", renewal)
        ]
    return [ok("tls.cert", f"valid until {end:%Y-%m-%d}")]


def _renewed_in_time(tls: TlsConfig, now: datetime, end: datetime) -> Finding:
    """A certificate that the daemon renews is late when half of the time between renewal and end is over."""
    due = datetime.fromtimestamp(CertificateFolder(tls.folder).renew_after(), UTC)
    until = f"valid until {end:%Y-%m-%d %H:%M} UTC"
    if now > due + (end - due) / 2:
        message = f"expected a renewal on {due:%Y-%m-%d %H:%M} UTC, got none: {until}"
        return warn("tls.cert", message, "start the daemon, or read renewal_failed in its log")
    return ok("tls.cert", f"{until}; the daemon renews it from {due:%Y-%m-%d %H:%M} UTC on")


def _use(certificate: x509.Certificate) -> list[Finding]:
    """Check that a certificate with named uses has clientAuth among them."""
    try:
        uses = list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
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


def check_policy(config: ClientConfig) -> Iterator[Finding]:
    """Read the file, and compare it with task and certificates. No finding without a policy."""
    if config.policy is None:
        return
    try:
        policy = read_policy(config.policy)
    except ConfigError as error:
        yield fail("policy", str(error).removeprefix("policy: "), "the daemon does not start without a valid file")
        return
    rules = ", ".join(policy.model_dump(exclude_defaults=True)) or "none"
    yield ok("policy", f"{config.policy} is valid; rules: {rules}")
    allowed = policy.tasks.allow
    for name in {served.name: None for served in config.served if allowed is not None and served.name not in allowed}:
        message = f"expected the task of the settings in tasks.allow, got {name!r}, which is not"
        yield fail("policy", message, "the device would refuse all work: allow the task, or set another one")
    yield from _coordinators(config, policy)
    if policy.privacy.wanted:
        for name in sorted({served.data for served in config.served}):
            yield from _account(AccountFiles.of(config.state_dir, name), policy)


def _account(files: AccountFiles, policy: Policy) -> Iterator[Finding]:
    """What the device's data has spent of the site's limit."""
    try:
        account = files.read()
    except StateError as error:
        yield fail("policy", str(error), "the daemon refuses all training with privacy until then")
        return
    limit, spent = policy.privacy.max_epsilon, 0.0 if account is None else account.epsilon()
    if limit is not None and spent >= limit:
        message = f"the data has spent epsilon {spent:.3g} of privacy.max_epsilon = {limit:g}"
        yield warn("policy", message, "all training is refused: it has no room for another round")


def _coordinators(config: ClientConfig, policy: Policy) -> Iterator[Finding]:
    rules = policy.coordinators
    if rules.ca_sha256 is None:
        if rules.ids is not None:
            message = "coordinators.ids alone: the id is known only after the registration has been sent"
            yield warn("policy", message, "add coordinators.ca_sha256: it is checked before anything is sent")
        return
    if config.tls is None:
        yield fail("policy", "expected [tls] for coordinators.ca_sha256, got plain text", "add [tls] to the settings")
        return
    try:
        bundle = config.tls.ca.read_bytes()
        trusted = trusted_certificates(bundle, rules.ca_sha256)
    except (OSError, ValueError):
        return  # reported by the check of certificates
    if not trusted:
        message = f"expected a certificate of coordinators.ca_sha256 in {config.tls.ca}, got others"
        yield fail("policy", message, "compare: openssl x509 -in ca.crt -noout -fingerprint -sha256")
