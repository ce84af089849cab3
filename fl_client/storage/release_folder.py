"""Released models on the device: each version in a folder of its own, and a link to the one in use.

    MODEL/00000003/        description.json and its signature, the files of the version, evaluation.json
    MODEL/current          a link to the version in use
    MODEL/before           a link to the version that was in use before it
    MODEL/announced.json   the version that the owner's program has taken

A version is written under a temporary name, synced and renamed, and a link is replaced by a rename. A process that is
killed at any write leaves the version before in use or the new one, and both whole. The owner's program reads the files
through the link.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from fl_client.settings.config import ReleasesConfig
from fl_client.storage.disk import PART, write_whole
from fl_common.files import fsync_path, make_folders
from fl_common.names import ID_PATTERN
from fl_common.released import WEIGHTS, Description, parse_description
from fl_common.settings import parse_json

CURRENT, BEFORE, ANNOUNCED = "current", "before", "announced.json"
DESCRIPTION, SIGNATURE, EVALUATION = "description.json", "description.sig", "evaluation.json"


@dataclass(frozen=True, slots=True)
class Installed:
    """A version on the disk."""

    path: Path
    description: Description

    @property
    def version(self) -> int:
        """The number of the version."""
        return self.description.version

    @property
    def weights(self) -> Path:
        """The file that is evaluated."""
        return self.path / WEIGHTS

    def is_whole(self) -> bool:
        """Whether all files have the bytes of the description. Raises OSError."""
        return all(_digest(self.path / file.name) == file.digest for file in self.description.files)

    def evaluation(self) -> dict[str, Any] | None:
        """What was measured with it; None: nothing yet."""
        try:
            kept = parse_json((self.path / EVALUATION).read_bytes())
        except (OSError, ValueError):
            return None
        return kept if isinstance(kept, dict) else None

    def keep_evaluation(self, found: Mapping[str, Any]) -> None:
        """Write what was measured. Raises OSError."""
        write_whole(self.path / EVALUATION, [json.dumps(found).encode()])


class ReleaseFolder:
    """The folder of all released models. Blocking; raises OSError."""

    def __init__(self, folder: Path) -> None:
        self.path = folder

    def in_use(self) -> dict[str, int]:
        """The version in use of each model."""
        names = sorted(path.name for path in self.path.iterdir()) if self.path.is_dir() else []
        found = {name: self.current(name) for name in names if ID_PATTERN.fullmatch(name)}
        return {name: installed.version for name, installed in found.items() if installed is not None}

    def current(self, model: str) -> Installed | None:
        """The version in use; None for none."""
        return self._linked(model, CURRENT)

    def before(self, model: str) -> Installed | None:
        """The version that was in use before; None for none."""
        return self._linked(model, BEFORE)

    def find(self, description: Description) -> Installed | None:
        """The version of a description, if it is here and whole."""
        installed = self._installed(self.path / description.model / _name(description.version))
        if installed is None or installed.description != description or not installed.is_whole():
            return None
        return installed

    def add(self, description: Description, signed: tuple[bytes, bytes], data: memoryview) -> Installed:
        """Write a version whose bytes were checked. signed: the bytes of its description, and their signature."""
        folder = self.path / description.model
        make_folders(folder, durable=True)
        for torn in folder.glob(f"*{PART}"):
            shutil.rmtree(torn) if torn.is_dir() and not torn.is_symlink() else torn.unlink()
        final = folder / _name(description.version)
        part = final.with_suffix(PART)
        part.mkdir()
        files = {DESCRIPTION: memoryview(signed[0]), SIGNATURE: memoryview(signed[1])}
        for file in description.files:
            start, size = description.span(file.name)
            files[file.name] = data[start : start + size]
        for name, content in files.items():
            with (part / name).open("wb") as written:
                written.write(content)
                written.flush()
                os.fsync(written.fileno())
        fsync_path(part)
        if final.exists():  # of a version that was damaged, or withdrawn and made again
            shutil.rmtree(final)
        part.rename(final)
        fsync_path(folder)
        return Installed(final, description)

    def use(self, model: str, installed: Installed | None) -> None:
        """Let the links name a version from now on; None: no version is in use."""
        folder, now = self.path / model, self.current(model)
        if installed is not None and now is not None and now.path != installed.path:
            _link(folder / BEFORE, now.path.name)
        if installed is not None:
            _link(folder / CURRENT, installed.path.name)
        elif now is not None:
            (folder / CURRENT).unlink()
            fsync_path(folder)

    def clear(self, model: str) -> None:
        """Remove the versions that are neither in use nor the one before."""
        kept = {found.path.name for found in (self.current(model), self.before(model)) if found is not None}
        for path in (self.path / model).iterdir():
            if path.is_dir() and not path.is_symlink() and path.name not in kept:
                shutil.rmtree(path)

    def announced(self, model: str) -> int | None:
        """The version that the owner's program has taken, 0 for none; None: it is not known."""
        try:
            content = parse_json((self.path / model / ANNOUNCED).read_bytes())
        except (OSError, ValueError):
            return None
        version = content.get("version") if isinstance(content, dict) else None
        return version if isinstance(version, int) else None

    def note_announced(self, model: str, version: int | None) -> None:
        """Note that the owner's program has taken a version. None: it is about to be told of one."""
        make_folders(self.path / model, durable=True)
        write_whole(self.path / model / ANNOUNCED, [json.dumps({"version": version}).encode()], durable=True)

    def _linked(self, model: str, link: str) -> Installed | None:
        try:
            name = (self.path / model / link).readlink().name
        except OSError:
            return None
        return self._installed(self.path / model / name)

    @staticmethod
    def _installed(path: Path) -> Installed | None:
        try:
            return Installed(path, parse_description((path / DESCRIPTION).read_bytes()))
        except (OSError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class Taken:
    """What a device needs to take releases."""

    config: ReleasesConfig
    folder: ReleaseFolder
    labels: Mapping[str, str]
    """Labels of this device."""
    max_bytes: int
    """Largest release that is downloaded."""


def _name(version: int) -> str:
    return f"{version:08d}"


def _link(link: Path, target: str) -> None:
    """Let a link name its target, in one step."""
    fresh = link.with_suffix(PART)
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(link)
    fsync_path(link.parent)


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, blake3).hexdigest()  # type: ignore[arg-type] # it has no copy()
    except FileNotFoundError:
        return ""
