"""The packages on this device: their files, what the owner decided, and what is installed, in the state directory.

    packages/HEX.package    as it came, HEX: its digest
    packages/HEX.approved   the owner lets it run
    packages/HEX.revoked    the owner does not
    packages/NAME.current   the digest of the package of this name that ran last
    packages/HEX/           its modules, installed; only after every check, under this name only when it is whole

Installed is with pip from the wheels alone: without an index, without dependencies that are not in the package,
without a build. Blocking.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fl_client.policy.config import Policy
from fl_client.storage.disk import make_folder, write_whole
from fl_common.packages import Manifest, PackageRefused, check_signers, check_wheels, unpack

FOLDER = "packages"
_PACKAGE, _APPROVED, _REVOKED, _CURRENT, _NEW = ".package", ".approved", ".revoked", ".current", ".new"
_INSTALL_S = 600.0
_SHOWN = 500


class HeldPackages:
    """The folder of a state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER

    def keep(self, data: bytes) -> Manifest:
        """Keep a package that came. Raises PackageRefused for one that is not whole, OSError."""
        manifest, _ = unpack(data)
        make_folder(self._folder)
        write_whole(self._path(manifest.digest, _PACKAGE), [data], durable=True)
        return manifest

    def manifests(self) -> Iterator[Manifest]:
        """The manifests of all packages here, whole or not."""
        for path in sorted(self._folder.glob(f"*{_PACKAGE}")):
            with suppress(PackageRefused, OSError):
                yield unpack(path.read_bytes())[0]

    def find(self, digest: str) -> Manifest | None:
        """The manifest of a package, whose bytes fit its digest; None if it is not here."""
        try:
            manifest, _ = unpack(self._path(digest, _PACKAGE).read_bytes())
        except (PackageRefused, OSError):
            return None
        return manifest if manifest.digest == digest else None

    def current(self, name: str) -> str:
        """Digest of the package of a name that ran last; empty if none did."""
        try:
            return (self._folder / f"{name}{_CURRENT}").read_text(encoding="utf-8")
        except OSError:
            return ""

    def set_current(self, manifest: Manifest) -> None:
        """A package runs: after a restart it is started before this device takes work. Raises OSError."""
        write_whole(self._folder / f"{manifest.name}{_CURRENT}", [manifest.digest.encode()], durable=True)

    def set_none(self, name: str) -> None:
        """No package of this name runs any more. Raises OSError."""
        (self._folder / f"{name}{_CURRENT}").unlink(missing_ok=True)

    def allow(self, manifest: Manifest, policy: Policy) -> None:
        """Raises PackageRefused unless the site's policy and the owner let a package run."""
        check_signers(manifest, policy.packages.signers)
        if self._path(manifest.digest, _REVOKED).exists():
            raise PackageRefused("revoked", "the owner has revoked it", manifest)
        if policy.packages.approval and not self._path(manifest.digest, _APPROVED).exists():
            todo = f"`fl-client packages approve {manifest.digest}` lets it run"
            raise PackageRefused("approval", f"the owner has not approved it; {todo}", manifest)

    def approve(self, digest: str) -> None:
        """Let a package run. Raises OSError."""
        self._path(digest, _REVOKED).unlink(missing_ok=True)
        write_whole(self._path(digest, _APPROVED), [f"{time.time():.0f}\n".encode()], durable=True)

    def revoke(self, digest: str) -> None:
        """Let a package run no more, and remove its modules. A running daemon ends its process. Raises OSError."""
        write_whole(self._path(digest, _REVOKED), [f"{time.time():.0f}\n".encode()], durable=True)
        self._path(digest, _APPROVED).unlink(missing_ok=True)
        shutil.rmtree(self._path(digest), ignore_errors=True)

    def install(self, manifest: Manifest, policy: Policy) -> Path:
        """Install a package, unless it is, after all checks of its bytes. Returns the folder of its modules.

        Raises PackageRefused, OSError.
        """
        self.allow(manifest, policy)
        folder = self._path(manifest.digest)
        if folder.is_dir():
            return folder
        again, wheels = unpack(self._path(manifest.digest, _PACKAGE).read_bytes())
        if again != manifest:
            raise PackageRefused("digest", "its file has changed since it came", manifest)
        check_wheels(manifest, wheels)
        new = self._path(manifest.digest, _NEW)
        shutil.rmtree(new, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=self._folder) as unpacked:
            paths = [Path(unpacked, signed.file) for signed in manifest.wheels]
            for path, data in zip(paths, wheels, strict=True):
                path.write_bytes(data)
            _install(paths, new, manifest)
        new.rename(folder)
        return folder

    def _path(self, digest: str, ending: str = "") -> Path:
        return self._folder / f"{digest.removeprefix('sha256:')}{ending}"


def _install(wheels: list[Path], folder: Path, manifest: Manifest) -> None:
    """Raises PackageRefused if pip does not take the wheels: they may be for another Python or machine."""
    command = [
        sys.executable, "-I", "-m", "pip", "install", "--no-index", "--no-deps", "--only-binary=:all:",
        "--no-cache-dir", "--no-compile", "--no-input", "--disable-pip-version-check", "--isolated",
        "--target", str(folder), *map(str, wheels),
    ]  # fmt: skip
    done = subprocess.run(  # noqa: S603 - files of ours, by absolute paths
        command, capture_output=True, text=True, timeout=_INSTALL_S, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-_SHOWN:]
        raise PackageRefused("install", f"pip does not install it: {said}", manifest)
