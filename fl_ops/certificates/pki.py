"""A folder with an authority and the certificates that it issued: create, issue, renew.

DIR/ca.crt and DIR/ca.key are the authority's, DIR/ROLE-NAME.crt and DIR/ROLE-NAME.key those of each holder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fl_common.certificates.names import ROLES
from fl_ops.certificates import ca
from fl_ops.errors import UsageError
from fl_ops.files import PRIVATE, Target, check_free, make_folder, written_whole

AUTHORITY = "ca"
"""Stem of the authority's files."""
CLIENT_BUNDLE = "client-ca.crt"
"""The authorities of a coordinator's callers, for `tls.client_ca`: the first one, and those of devices and workers."""
CALLERS = ("client", "worker")
"""Roles that may have an authority of their own at a coordinator."""
_SERVICE = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
"""A Service and its namespace, as Kubernetes allows their names."""


@dataclass(frozen=True)
class Pair:
    """The paths of a certificate and its key: DIR/STEM.crt and DIR/STEM.key."""

    directory: Path
    stem: str
    replace: bool = False

    @property
    def certificate(self) -> Path:
        """Readable by all users."""
        return self.directory / f"{self.stem}.crt"

    @property
    def key(self) -> Path:
        """Readable by its owner only."""
        return self.directory / f"{self.stem}.key"

    @property
    def authority(self) -> Path:
        """The certificate of the authority that signed this one."""
        return self.directory / f"{AUTHORITY}.crt"

    def write(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, remedy: str) -> None:
        """Write both files or neither. Raises UsageError with `remedy` if one exists and may not be replaced."""
        targets = (Target(self.key, PRIVATE, self.replace), Target(self.certificate, replace=self.replace))
        for target in targets:
            check_free(target, remedy)
        with written_whole(targets[0]) as key_file, written_whole(targets[1]) as certificate_file:
            key_file.write(ca.key_pem(key))
            # Both are on the disk before either is put in place, so a full disk cannot separate a pair.
            key_file.flush()
            certificate_file.write(ca.certificate_pem(certificate))


@dataclass(frozen=True)
class Issued:
    """A certificate that was written to its files."""

    pair: Pair
    certificate: x509.Certificate

    @property
    def not_after(self) -> str:
        """End of the validity, in ISO 8601."""
        return self.certificate.not_valid_after_utc.isoformat()

    def text(self, hint: str) -> str:
        """Files, names and validity, for the terminal; the hint names the next step."""
        until = f"valid until {self.certificate.not_valid_after_utc:%Y-%m-%d}"
        names = ", ".join([*_names(self.certificate), until])
        return f"made {self.pair.certificate} and {self.pair.key}\n{names}\n{hint}"

    def facts(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "certificate": str(self.pair.certificate),
            "key": str(self.pair.key),
            "subject": self.certificate.subject.rfc4514_string(),
            "names": _names(self.certificate),
            "serial": f"{self.certificate.serial_number:x}",
            "not_after": self.not_after,
        }


@dataclass(frozen=True)
class LeafRequest:
    """A leaf certificate to issue."""

    directory: Path
    role: str
    name: str
    days: int
    force: bool
    hosts: tuple[str, ...] = ()

    @property
    def pair(self) -> Pair:
        """The paths of its files."""
        return Pair(self.directory, f"{self.role}-{self.name}", self.force)


def init(directory: Path, name: str, days: int) -> Issued:
    """Make an authority in a folder. Raises UsageError."""
    return make_authority(Pair(directory, AUTHORITY), name, days)


def init_for_role(directory: Path, role: str, days: int) -> Issued:
    """Make an authority for one role beside the first one, and the bundle of all that a coordinator trusts.

    Its name is that of the first authority and the role. Raises UsageError.
    """
    first = load_authority(Pair(directory, AUTHORITY)).certificate
    name = f"{first.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value!s:.50} {role}s"
    issued = make_authority(Pair(directory, f"{AUTHORITY}-{role}"), name, days, role)
    if role in CALLERS:
        write_client_bundle(directory)
    return issued


def make_authority(pair: Pair, name: str, days: int, role: str = "") -> Issued:
    """Make an authority with these files. role: the only one of its leaves; empty: any. Raises UsageError."""
    try:
        authority = ca.make_authority(name, ca.Validity(_now(), days), role)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    make_folder(pair.directory)
    pair.write(authority.certificate, authority.key, "certificates of this authority are in use; choose another --dir")
    return Issued(pair, authority.certificate)


def write_client_bundle(directory: Path) -> None:
    """Write the bundle again, if the folder has an authority for devices or workers."""
    own = [Pair(directory, f"{AUTHORITY}-{role}").certificate for role in CALLERS]
    if found := [file for file in own if file.exists()]:
        with written_whole(Target(directory / CLIENT_BUNDLE, replace=True)) as bundle:
            for file in (Pair(directory, AUTHORITY).certificate, *found):
                bundle.write(file.read_bytes())


def issue(request: LeafRequest) -> Issued:
    """Issue a leaf and write its files. Raises UsageError."""
    authority = load_authority(Pair(request.directory, AUTHORITY))
    try:
        identity = ca.Identity(request.role, request.name, request.hosts)
        certificate, key = ca.issue(authority, identity, ca.Validity(_now(), request.days))
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    request.pair.write(certificate, key, f"`fl ca renew {request.pair.stem}` renews it, or --force")
    return Issued(request.pair, certificate)


def server_hosts(hosts: Sequence[str], services: Sequence[str]) -> tuple[str, ...]:
    """The hosts, and every name by which a cluster's DNS knows the services, each once.

    services: NAME.NAMESPACE. With one, localhost is among them, because `kubectl port-forward` listens there.
    Raises UsageError for another form, and without any host.
    """
    names: list[str] = []
    for service in services:
        if not _SERVICE.fullmatch(service):
            raise UsageError(f"--service: expected NAME.NAMESPACE such as fl-server.impetus, got {service!r}")
        names += [service.partition(".")[0], service, f"{service}.svc", f"{service}.svc.cluster.local"]
    all_names = tuple(dict.fromkeys([*hosts, *(("localhost", "127.0.0.1") if services else ()), *names]))
    if not all_names:
        raise UsageError("expected --host or --service at least once: the names by which clients dial the coordinator")
    return all_names


def renew(
    directory: Path, days: int, *, source: Path | None = None, holders: Sequence[str] = (), within: int | None = None
) -> list[Issued]:
    """Issue new leaves with new keys to the same holders, in the authority's folder.

    Args:
        directory: of the authority.
        days: of the new leaves.
        source: the folder of the old leaves; None: the same.
        holders: file stems of leaves; none: all.
        within: only leaves that end within so many days.

    Raises UsageError.
    """
    authority = load_authority(Pair(directory, AUTHORITY))
    last = _now() + timedelta(days=within) if within else datetime.max.replace(tzinfo=UTC)
    renewed = []
    for stem, old in _leaves(source or directory, holders):
        if old.not_valid_after_utc > last:
            continue
        try:
            certificate, key = ca.issue(authority, ca.identity_of(old), ca.Validity(_now(), days))
        except ValueError as exc:
            raise UsageError(f"{stem}: {exc}") from exc
        pair = Pair(directory, stem, replace=True)
        pair.write(certificate, key, "")
        renewed.append(Issued(pair, certificate))
    return renewed


def _leaves(folder: Path, holders: Sequence[str]) -> Iterator[tuple[str, x509.Certificate]]:
    """The leaves in a folder, by file stem: the requested ones, or all."""
    stems = holders or sorted(path.stem for role in ROLES for path in folder.glob(f"{role}-*.crt"))
    if not stems:
        raise UsageError(f"there is no certificate in {folder}: `fl ca issue` makes one")
    for stem in stems:
        path = folder / f"{stem}.crt"
        try:
            yield stem, x509.load_pem_x509_certificate(path.read_bytes())
        except OSError as exc:
            raise UsageError(f"{path} cannot be read: {exc.strerror}") from exc
        except ValueError as exc:
            raise UsageError(f"{path} is no certificate: {exc}") from exc


def load_authority(pair: Pair) -> ca.Authority:
    """The authority of these files that signs: of several certificates, the one that the key belongs to.

    Raises UsageError.
    """
    try:
        return ca.load_authority(pair.certificate.read_bytes(), pair.key.read_bytes())
    except FileNotFoundError as exc:
        raise UsageError(
            f"there is no authority in {pair.directory}: `fl ca init --dir {pair.directory}` makes one"
        ) from exc
    except OSError as exc:
        raise UsageError(f"{exc.filename} cannot be read: {exc.strerror}") from exc
    except (ValueError, TypeError, x509.ExtensionNotFound) as exc:
        raise UsageError(f"{pair.certificate} and {pair.key} are no authority: {exc}") from exc


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _now() -> datetime:
    return datetime.now(UTC)
