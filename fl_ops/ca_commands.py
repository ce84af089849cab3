"""`fl ca`: the files of a small certificate authority. The certificates themselves are made in `ca.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fl_ops import ca, output
from fl_ops.errors import Misused
from fl_ops.files import PRIVATE, Target, check_free, make_folder, written_whole
from fl_ops.options import Context, command

app = typer.Typer(no_args_is_help=True, help="Make certificates for a site that has no authority of its own.")
issue_app = typer.Typer(no_args_is_help=True, help="Issue a certificate to a server, a client or an admin.")
app.add_typer(issue_app, name="issue")

Dir = Annotated[Path, typer.Option("--dir", metavar="DIR", help="Folder of the authority and of what it issues.")]
Days = Annotated[int, typer.Option(min=1, max=36_500, help="How long it is valid.")]
Force = Annotated[bool, typer.Option("--force", help="Write over an older certificate and key: renewal.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="1 to 64 letters, digits, dots, dashes, underscores.")]

_AUTHORITY = "ca"


@app.command()
@command
def init(
    context: Context,
    directory: Dir = Path("pki"),
    name: Annotated[str, typer.Option(help="What people see as the issuer.")] = "Impetus CA",
    days: Days = 3_650,
) -> None:
    """Make an authority: ca.key, which stays here, and ca.crt, which everybody gets."""
    try:
        authority = ca.make_authority(name, ca.Validity(_now(), days))
    except ValueError as exc:
        raise Misused(str(exc)) from exc
    make_folder(directory)
    pair = _Pair(directory, _AUTHORITY)
    pair.write(authority.certificate, authority.key, "certificates of this authority are in use; take another --dir")
    hint = f"next: `fl ca issue server --dir {directory} --host HOST`; keep {pair.key} secret and off the devices"
    _tell(context, pair, authority.certificate, hint)


@issue_app.command()
@command
def server(
    context: Context,
    host: Annotated[list[str], typer.Option(help="DNS name or IP address at which it is reached; repeat for more.")],
    name: Annotated[str, typer.Option(help="What the server is called in logs.")] = "coordinator",
    directory: Dir = Path("pki"),
    days: Days = 90,
    force: Force = False,
) -> None:
    """Issue a coordinator's certificate."""
    order = _Order(directory, "server", name, days, force, tuple(host))
    pair = order.pair
    _issue(context, order, f"in server.toml: cert = {pair.certificate}, key = {pair.key}, ca = {pair.authority}")


@issue_app.command()
@command
def client(context: Context, name: Name, directory: Dir = Path("pki"), days: Days = 90, force: Force = False) -> None:
    """Issue a device's certificate; its daemon can only register by this name."""
    order = _Order(directory, "client", name, days, force)
    pair = order.pair
    hint = f"copy {pair.certificate}, {pair.key} and {pair.authority} to the device and name them in its client.toml"
    _issue(context, order, hint)


@issue_app.command()
@command
def admin(context: Context, name: Name, directory: Dir = Path("pki"), days: Days = 90, force: Force = False) -> None:
    """Issue an operator's certificate for this command."""
    order = _Order(directory, "admin", name, days, force)
    pair = order.pair
    _issue(context, order, f"fl run list --ca {pair.authority} --cert {pair.certificate} --key {pair.key}")


@app.command()
@command
def renew(
    context: Context,
    holder: Annotated[list[str] | None, typer.Argument(help="client-edge-3, server-coordinator; none: all.")] = None,
    directory: Dir = Path("pki"),
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Folder of the old ones, if another: a new authority.")
    ] = None,
    within: Annotated[int | None, typer.Option(min=1, help="Only those that end in so many days.")] = None,
    days: Days = 90,
) -> None:
    """Issue new certificates and keys to whoever has one, with the same roles, names and hosts.

    Running coordinators and daemons take up what lies in their files.
    """
    authority = _load_authority(_Pair(directory, _AUTHORITY))
    last = _now() + timedelta(days=within) if within else datetime.max.replace(tzinfo=UTC)
    made = []
    for stem, old in _leaves(source or directory, holder or ()):
        if old.not_valid_after_utc > last:
            continue
        try:
            certificate, key = ca.issue(authority, ca.identity_of(old), ca.Validity(_now(), days))
        except ValueError as exc:
            raise Misused(f"{stem}: {exc}") from exc
        pair = _Pair(directory, stem, replace=True)
        pair.write(certificate, key, "")
        made.append(_facts(pair, certificate))
    words = "\n".join(f"made {each['certificate']} and {each['key']}, until {each['not_after'][:10]}" for each in made)
    output.show({"renewed": made}, words or f"nothing ends within {within} days", context.as_json)


def _leaves(folder: Path, holders: Sequence[str]) -> Iterator[tuple[str, x509.Certificate]]:
    """What `fl ca issue` has left in a folder, by the files' stem: those that are asked for, or all of it."""
    stems = holders or sorted(path.stem for role in ca.ROLES for path in folder.glob(f"{role}-*.crt"))
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


@dataclass(frozen=True)
class _Pair:
    """Where a certificate and its key lie: DIR/STEM.crt, DIR/STEM.key, beside the authority's DIR/ca.crt."""

    directory: Path
    stem: str
    replace: bool = False

    @property
    def certificate(self) -> Path:
        return self.directory / f"{self.stem}.crt"

    @property
    def key(self) -> Path:
        return self.directory / f"{self.stem}.key"

    @property
    def authority(self) -> Path:
        return self.directory / f"{_AUTHORITY}.crt"

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
class _Order:
    """A leaf that was asked for."""

    directory: Path
    role: str
    name: str
    days: int
    force: bool
    hosts: tuple[str, ...] = ()

    @property
    def pair(self) -> _Pair:
        return _Pair(self.directory, f"{self.role}-{self.name}", self.force)


def _issue(context: Context, order: _Order, hint: str) -> None:
    authority = _load_authority(_Pair(order.directory, _AUTHORITY))
    try:
        identity = ca.Identity(order.role, order.name, order.hosts)
        certificate, key = ca.issue(authority, identity, ca.Validity(_now(), order.days))
    except ValueError as exc:
        raise Misused(str(exc)) from exc
    order.pair.write(certificate, key, f"`fl ca renew {order.pair.stem}` renews it, or --force")
    _tell(context, order.pair, certificate, hint)


def _load_authority(pair: _Pair) -> ca.Authority:
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


def _tell(context: Context, pair: _Pair, certificate: x509.Certificate, hint: str) -> None:
    until = f"valid until {certificate.not_valid_after_utc:%Y-%m-%d}"
    words = f"made {pair.certificate} and {pair.key}\n{', '.join([*_names(certificate), until])}\n{hint}"
    output.show(_facts(pair, certificate), words, context.as_json)


def _facts(pair: _Pair, certificate: x509.Certificate) -> dict[str, Any]:
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
