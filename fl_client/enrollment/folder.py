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

from fl_client.enrollment.requests import Issued, KeyRequest, new_request, renew_time, request_of
from fl_common.atomic_files import fsync_path, make_folders
from fl_common.certificates.pem import invalid_now

NAME = "tls"
"""Of the folder in the state directory."""
CERT, KEY, CA = "tls.crt", "tls.key", "ca.crt"
_CURRENT, _PENDING, _RENEWAL, _ISSUED = "current", "pending", "renewal.json", "issued-"
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
                found = state_dir.stat()
                owner = (found.st_uid, found.st_gid)
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
            found = json.loads((self.current / _RENEWAL).read_bytes())["renew_after"]
            if isinstance(found, int | float) and math.isfinite(found):
                return float(found)
        except (OSError, ValueError, KeyError, TypeError):
            pass
        leaf = self.certificate()
        return 0.0 if leaf is None else renew_time(leaf)

    def pending(self) -> KeyRequest:
        """The key and request of the enrollment in progress. They are on the disk before a token is spent on them.

        While a certificate is valid, its name is given to its key only, so that key is used again.
        """
        folder = self.path / _PENDING
        with suppress(OSError):
            return KeyRequest((folder / KEY).read_bytes(), (folder / _REQUEST).read_bytes())
        leaf = self.certificate()
        request = None
        if leaf is not None and invalid_now(leaf, datetime.now(UTC)) is None:
            with suppress(OSError, ValueError):
                request = request_of((self.current / KEY).read_bytes())
        return self._begin(request or new_request())

    def begin_again(self) -> KeyRequest:
        """As `pending`, with a new key."""
        return self._begin(new_request())

    def _begin(self, request: KeyRequest) -> KeyRequest:
        folder = self.path / _PENDING
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
