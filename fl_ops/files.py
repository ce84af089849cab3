"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fl_common.atomic_files import atomic_writer
from fl_ops.errors import OpsError, Refused, UsageError

PUBLIC = 0o644
PRIVATE = 0o600


@dataclass(frozen=True)
class Target:
    """Where a file goes: its path, its permissions, and whether it may take the place of an older one."""

    path: Path
    mode: int = PUBLIC
    replace: bool = False


def check_free(target: Target, remedy: str) -> None:
    """Raises UsageError with `remedy` when a file is in the way."""
    if not target.replace and os.path.lexists(target.path):
        raise UsageError(f"{target.path} exists already and is not overwritten: {remedy}")


@contextmanager
def written_whole(target: Target) -> Iterator[BinaryIO]:
    """A file to write to, which appears at its path when the block ends well, and not at all otherwise.

    Raises:
        UsageError: a file is in the way and may not be replaced; the folder is missing.
        Refused: the disk is full, or the folder may not be written to.
    """
    with _told(target.path), atomic_writer(target.path, replace=target.replace) as file:
        yield file
        os.fchmod(file.fileno(), target.mode)


def make_folder(path: Path) -> None:
    """A folder for its owner only, if there is none yet. Raises an `OpsError` when it cannot be made."""
    with _told(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """The operating system's errors in words, with the path that was asked for."""
    try:
        yield
    except OpsError:
        raise
    except FileExistsError as exc:
        raise UsageError(f"{path} exists already and is not overwritten") from exc
    except FileNotFoundError as exc:
        raise UsageError(f"{path} cannot be written: there is no folder {path.parent}; make it first") from exc
    except OSError as exc:
        raise Refused(f"{path} cannot be written: {exc.strerror or exc}") from exc
