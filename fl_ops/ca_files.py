"""Where `fl ca` keeps what it makes: a folder with the authority's pair and one pair for each holder, told and renewed.

Apart from the commands, so that `fl` starts without the library that makes certificates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fl_ops import ca, output
from fl_ops.errors import Misused
from fl_ops.files import PRIVATE, Target, check_free, make_folder, written_whole
from fl_ops.options import Context
from protos.holder import ROLES

AUTHORITY = "ca"
"""Stem of the authority's own files."""


@dataclass(frozen=True)
class Pair:
    """Where a certificate and its key lie: DIR/STEM.crt, DIR/STEM.key, beside the authority's DIR/ca.crt."""

    directory: Path
    stem: str
    replace: bool = False

    @property
    def certificate(self) -> Path:
        """Readable by everybody."""
        return self.directory / f"{self.stem}.crt"

    @property
    def key(self) -> Path:
        """Readable by its owner."""
        return self.directory / f"{self.stem}.key"

    @property
    def authority(self) -> Path:
        """The certificate that this one is signed by."""
        return self.directory / f"{AUTHORITY}.crt"

    def write(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, remedy: str) -> None:
        """Both files or none."""
        targets = (Target(self.key, PRIVATE, self.replace), Target(self.certificate, replace=self.replace))
        for target in targets:
            check_free(target, remedy)
        with written_whole(targets[0]) as key_file, written_whole(targets[1]) as certificate_file:
            key_file.write(ca.key_pem(key))
            # Both are on the disk before either takes its place: a full disk parts no pair.
            key_file.flush()
            certificate_file.write(ca.certificate_pem(certificate))


@dataclass(frozen=True)
class Order:
    """A leaf that was asked for."""

    directory: Path
    role: str
    name: str
    days: int
    force: bool
    hosts: tuple[str, ...] = ()

    @property
    def pair(self) -> Pair:
        """Where it will lie."""
        return Pair(self.directory, f"{self.role}-{self.name}", self.force)


@dataclass(frozen=True)
class Renewal:
    """Which leaves are renewed: those of `holders` (stems; none: all) in `source` that end `within` so many days."""

    source: Path
    holders: tuple[str, ...]
    within: int | None
    days: int


def init(context: Context, directory: Path, name: str, days: int) -> None:
    """Make an authority in a folder and tell what comes next. Raises Misused."""
    try:
        authority = ca.make_authority(name, ca.Validity(_now(), days))
    except ValueError as exc:
        raise Misused(str(exc)) from exc
    make_folder(directory)
    pair = Pair(directory, AUTHORITY)
    pair.write(authority.certificate, authority.key, "certificates of this authority are in use; take another --dir")
    hint = f"next: `fl ca issue server --dir {directory} --host HOST`; keep {pair.key} secret and off the devices"
    _tell(context, pair, authority.certificate, hint)


def issue(context: Context, order: Order, hint: str) -> None:
    """Sign what was ordered and tell where it lies. Raises Misused."""
    authority = _load_authority(Pair(order.directory, AUTHORITY))
    try:
        identity = ca.Identity(order.role, order.name, order.hosts)
        certificate, key = ca.issue(authority, identity, ca.Validity(_now(), order.days))
    except ValueError as exc:
        raise Misused(str(exc)) from exc
    order.pair.write(certificate, key, f"`fl ca renew {order.pair.stem}` renews it, or --force")
    _tell(context, order.pair, certificate, hint)


def renew(context: Context, directory: Path, renewal: Renewal) -> None:
    """Sign new leaves with new keys for the same holders, into the authority's folder. Raises Misused."""
    authority = _load_authority(Pair(directory, AUTHORITY))
    within = renewal.within
    last = _now() + timedelta(days=within) if within else datetime.max.replace(tzinfo=UTC)
    made = []
    for stem, old in _leaves(renewal.source, renewal.holders):
        if old.not_valid_after_utc > last:
            continue
        try:
            certificate, key = ca.issue(authority, ca.identity_of(old), ca.Validity(_now(), renewal.days))
        except ValueError as exc:
            raise Misused(f"{stem}: {exc}") from exc
        pair = Pair(directory, stem, replace=True)
        pair.write(certificate, key, "")
        made.append(_facts(pair, certificate))
    words = "\n".join(f"made {each['certificate']} and {each['key']}, until {each['not_after'][:10]}" for each in made)
    output.show({"renewed": made}, words or f"nothing ends within {within} days", context.as_json)


def _leaves(folder: Path, holders: Sequence[str]) -> Iterator[tuple[str, x509.Certificate]]:
    """What `fl ca issue` has left in a folder, by the files' stem: those that are asked for, or all of it."""
    stems = holders or sorted(path.stem for role in ROLES for path in folder.glob(f"{role}-*.crt"))
    if not stems:
        raise Misused(f"there is no certificate in {folder}: `fl ca issue` makes one")
    for stem in stems:
        path = folder / f"{stem}.crt"
        try:
            yield stem, x509.load_pem_x509_certificate(path.read_bytes())
        except OSError as exc:
            raise Misused(f"{path} cannot be read: {exc.strerror}") from exc
        except ValueError as exc:
            raise Misused(f"{path} is no certificate: {exc}") from exc


def _load_authority(pair: Pair) -> ca.Authority:
    try:
        return ca.load_authority(pair.certificate.read_bytes(), pair.key.read_bytes())
    except FileNotFoundError as exc:
        raise Misused(
            f"there is no authority in {pair.directory}: `fl ca init --dir {pair.directory}` makes one"
        ) from exc
    except OSError as exc:
        raise Misused(f"{exc.filename} cannot be read: {exc.strerror}") from exc
    except (ValueError, TypeError, x509.ExtensionNotFound) as exc:
        raise Misused(f"{pair.certificate} and {pair.key} are no authority: {exc}") from exc


def _tell(context: Context, pair: Pair, certificate: x509.Certificate, hint: str) -> None:
    until = f"valid until {certificate.not_valid_after_utc:%Y-%m-%d}"
    words = f"made {pair.certificate} and {pair.key}\n{', '.join([*_names(certificate), until])}\n{hint}"
    output.show(_facts(pair, certificate), words, context.as_json)


def _facts(pair: Pair, certificate: x509.Certificate) -> dict[str, Any]:
    return {
        "certificate": str(pair.certificate),
        "key": str(pair.key),
        "subject": certificate.subject.rfc4514_string(),
        "names": _names(certificate),
        "serial": f"{certificate.serial_number:x}",
        "not_after": certificate.not_valid_after_utc.isoformat(),
    }


def _names(certificate: x509.Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [str(name.value) for name in names]


def _now() -> datetime:
    return datetime.now(UTC)
