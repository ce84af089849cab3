"""The folder of a certificate that the coordinator issues: STATE_DIR/tls.

current          a link to the folder in use, which is replaced in one step: a reader and a killed process find a
                 certificate with its own key, never a part of the next one
issued-SERIAL    tls.crt, tls.key, ca.crt, and renewal.json with the time of the next renewal
pending          the key and the request of an enrollment whose settings are not written yet
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from fl_client.errors import UnusableCertificate
from fl_common.certificates.names import Holder, NoHolder, holder_of
from fl_common.certificates.pem import invalid_now
from fl_common.files import fsync_path, make_folders
from protos.fl.v1.enrollment_pb2 import IssuedCertificate

_SHARE = 2 / 3
"""Part of a certificate's life after which it is renewed, where the coordinator does not name the time."""


@dataclass(frozen=True, slots=True)
class KeyRequest:
    """A private key and a request for its certificate."""

    key: bytes
    """PEM, without a password."""
    csr: bytes
    """PKCS#10 in DER, with an empty subject: the coordinator decides about the names."""

    def __repr__(self) -> str:
        return f"KeyRequest(csr={len(self.csr)} bytes)"


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate with its key and authority, as they go to the disk."""

    name: str
    """The id that the client will have."""
    cert: bytes
    """PEM: the certificate, then intermediate authorities."""
    key: bytes
    ca: bytes
    """PEM: the authorities of the coordinator's certificate."""
    serial: str
    renew_after: float
    """Unix seconds."""
    labels: Mapping[str, str]

    def __repr__(self) -> str:
        return f"Issued(name={self.name!r}, serial={self.serial!r})"


def new_request() -> KeyRequest:
    """A new key on P-256 and its request."""
    return _request(ec.generate_private_key(ec.SECP256R1()))


def request_of(key_pem: bytes) -> KeyRequest:
    """A request for an existing key. Raises ValueError for one that is not on an elliptic curve."""
    key = load_pem_private_key(key_pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("expected an elliptic-curve key, got one of another kind")
    return _request(key)


def _request(key: ec.EllipticCurvePrivateKey) -> KeyRequest:
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return KeyRequest(pem, csr.public_bytes(Encoding.DER))


def signed(data: bytes, key_pem: bytes) -> bytes:
    """The signature of `data`: ECDSA with SHA-256, or Ed25519. Raises UnusableCertificate for a key of another kind."""
    key = load_pem_private_key(key_pem, password=None)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return key.sign(data, ec.ECDSA(hashes.SHA256()))
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(data)
    raise UnusableCertificate("expected an EC or Ed25519 key of the expired certificate, got one of another kind")


def checked(issued: IssuedCertificate, key_pem: bytes, name: str = "") -> Issued:
    """The answer, if it fits the key. Dates are not checked, because this device's clock may be wrong.

    name: the client id that the certificate must have; empty: any.

    Raises:
        UnusableCertificate: it is for another key, for another holder, or cannot be parsed.
    """
    try:
        leaf = x509.load_pem_x509_certificates(issued.chain)[0]
        x509.load_pem_x509_certificates(issued.authority)
        own = load_pem_private_key(key_pem, password=None).public_key() == leaf.public_key()
        holder = holder_of(leaf)
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:  # NoHolder is a ValueError
        what = str(error) if isinstance(error, NoHolder) else f"one that cannot be parsed ({error})"
        raise UnusableCertificate(f"expected a client's certificate and its authority, got {what}") from None
    if not own:
        raise UnusableCertificate("expected a certificate for this device's new key, got one for another key")
    if holder.role != "client" or (name and holder != Holder("client", name)):
        wanted = f"fl://client/{name}" if name else "a client"
        raise UnusableCertificate(f"expected a certificate of {wanted}, got one of {holder.uri}")
    return Issued(
        holder.name,
        issued.chain,
        key_pem,
        issued.authority,
        f"{leaf.serial_number:x}",
        issued.renew_after.seconds + issued.renew_after.nanos / 1e9 or renew_time(leaf),
        dict(issued.labels),
    )


def renew_time(leaf: x509.Certificate) -> float:
    """Unix seconds at which two thirds of a certificate's life are over."""
    begin, end = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
    return begin + (end - begin) * _SHARE


NAME = "tls"
"""The name of the folder in the state directory."""
CERT, KEY, CA = "tls.crt", "tls.key", "ca.crt"
_CURRENT, _PENDING, _NEXT, _RENEWAL, _ISSUED = "current", "pending", "next", "renewal.json", "issued-"
_REQUEST = "request.der"
_PRIVATE, _PUBLIC = 0o600, 0o644
_STALE_S = 3600.0
"""Age from which a folder that is not in use is a left-over of a killed process."""


@dataclass(frozen=True)
class CertificateFolder:
    """Reads and replaces a certificate. All methods block, and raise OSError."""

    path: Path
    owner: tuple[int, int] | None = None
    """User and group that get the files; None: those of this process."""

    @classmethod
    def in_state(cls, state_dir: Path) -> CertificateFolder:
        """The folder of a state directory. Files that root writes get the owner of that directory."""
        owner = None
        if os.geteuid() == 0:
            with suppress(OSError):
                facts = state_dir.stat()
                owner = (facts.st_uid, facts.st_gid)
        return cls(state_dir.absolute() / NAME, owner)

    @property
    def current(self) -> Path:
        """The files in use; missing before the first certificate."""
        return self.path / _CURRENT

    def files(self) -> dict[str, Path]:
        """The paths for the settings' section [tls]."""
        return {"ca": self.current / CA, "cert": self.current / CERT, "key": self.current / KEY}

    def certificate(self) -> x509.Certificate | None:
        """The certificate in use. None if there is none that can be read."""
        try:
            return x509.load_pem_x509_certificate((self.current / CERT).read_bytes())
        except (OSError, ValueError):
            return None

    def renew_after(self) -> float:
        """Unix seconds from which on the certificate in use is to be renewed; 0.0 if there is no certificate."""
        try:
            renew_after = json.loads((self.current / _RENEWAL).read_bytes())["renew_after"]
            if isinstance(renew_after, int | float) and math.isfinite(renew_after):
                return float(renew_after)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        leaf = self.certificate()
        return 0.0 if leaf is None else renew_time(leaf)

    def pending(self) -> KeyRequest:
        """The key and request of the enrollment in progress. They are on the disk before a token is spent on them.

        While a certificate is valid, its name is given to its key only, so that key is used again.
        """
        if (begun := self._begun(_PENDING)) is not None:
            return begun
        leaf = self.certificate()
        request = None
        if leaf is not None and invalid_now(leaf, datetime.now(UTC)) is None:
            with suppress(OSError, ValueError):
                request = request_of((self.current / KEY).read_bytes())
        return self._begin(request or new_request(), _PENDING)

    def begin_again(self) -> KeyRequest:
        """The result of `pending`, with a new key."""
        return self._begin(new_request(), _PENDING)

    def next_request(self) -> KeyRequest:
        """The key and request of the renewal in progress, which are on the disk before the coordinator is asked.

        If its answer is lost, the repeat is for the same key. A coordinator renews an expired certificate that has been
        renewed already for that key only.
        """
        return self._begun(_NEXT) or self._begin(new_request(), _NEXT)

    def drop_next(self) -> None:
        """Forget the key of the renewal in progress."""
        shutil.rmtree(self.path / _NEXT, ignore_errors=True)

    def _begun(self, name: str) -> KeyRequest | None:
        folder = self.path / name
        with suppress(OSError):
            return KeyRequest((folder / KEY).read_bytes(), (folder / _REQUEST).read_bytes())
        return None

    def _begin(self, request: KeyRequest, name: str) -> KeyRequest:
        folder = self.path / name
        new = self._new_folder({KEY: request.key, _REQUEST: request.csr})
        shutil.rmtree(folder, ignore_errors=True)
        new.replace(folder)
        fsync_path(self.path)
        return request

    def reuses_key(self) -> bool:
        """Whether the pending key is that of the certificate in use."""
        with suppress(OSError):
            return (self.path / _PENDING / KEY).read_bytes() == (self.current / KEY).read_bytes()
        return False

    def is_pending(self) -> bool:
        """Whether an enrollment has begun and not ended."""
        return (self.path / _PENDING).exists()

    def end_pending(self) -> None:
        """Forget the key of the enrollment: its certificate and the settings are on the disk."""
        shutil.rmtree(self.path / _PENDING, ignore_errors=True)

    def prepare(self, issued: Issued) -> Path:
        """Write the certificate into a folder of its own, which survives a power cut and is not used yet."""
        renewal = json.dumps({"renew_after": issued.renew_after}).encode()
        folder = self.path / f"{_ISSUED}{issued.serial}"
        if not folder.exists():
            new = self._new_folder({CERT: issued.cert, KEY: issued.key, CA: issued.ca, _RENEWAL: renewal})
            new.replace(folder)
            fsync_path(self.path)
        return folder

    def activate(self, folder: Path) -> Path | None:
        """Use a prepared folder from now on. Returns the folder that was in use."""
        before = None
        with suppress(OSError):
            before = self.path / self.current.readlink()
        link = self.path / f".{_CURRENT}.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        self._give(link)
        link.replace(self.current)
        return None if before == folder else before

    def settle(self, before: Path | None) -> None:
        """Make an activation survive a power cut, and remove the earlier folder."""
        fsync_path(self.path)
        self.drop_next()
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def install(self, issued: Issued) -> None:
        """Prepare, activate and settle."""
        self.settle(self.activate(self.prepare(issued)))

    def clean(self) -> None:
        """Remove what killed processes left behind, and nothing that another process may be about to use."""
        used = self.current.resolve()
        for path in self.path.iterdir() if self.path.is_dir() else ():
            left_over = path.name.startswith((_ISSUED, ".")) and path.resolve() != used
            if left_over and path.lstat().st_mtime < time.time() - _STALE_S:
                shutil.rmtree(path, ignore_errors=True)

    def _new_folder(self, contents: Mapping[str, bytes]) -> Path:
        """A durable folder with these files and a temporary name."""
        if not self.path.exists():
            make_folders(self.path, durable=True)
            self.path.chmod(0o700)
            self._give(self.path)
        folder = Path(tempfile.mkdtemp(prefix=".new-", dir=self.path))
        for name, content in contents.items():
            mode = _PRIVATE if name == KEY else _PUBLIC
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            self._give(folder / name)
        fsync_path(folder)
        self._give(folder)
        return folder

    def _give(self, path: Path) -> None:
        if self.owner is not None:
            os.chown(path, *self.owner, follow_symlinks=False)
