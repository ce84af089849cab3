"""Files that are written whole or not at all, and TOML files of runs that are read."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fl_common.files import atomic_writer
from fl_common.settings import other_kind, parse_toml
from fl_ops.errors import OpsError, Refused, UsageError
from protos.fl.v1 import admin_pb2
from protos.run_file import SIMULATION, parse_run

PUBLIC = 0o644
PRIVATE = 0o600


@dataclass(frozen=True)
class Target:
    """Where a file goes: its path, its permissions, and whether it may take the place of an older one."""

    path: Path
    mode: int = PUBLIC
    replace: bool = False


_LONGEST_NAME = 200


def file_name(what: str, name: str) -> str:
    """The name, which becomes the name of one file or folder. It may come from a coordinator or from a ledger.

    what: of what it is the name, for the message. Raises Refused for a name that leads to another folder, is hidden, an
    option of a command, or a control sequence of a terminal.
    """
    plain = name.isprintable() and not name.startswith((".", "-")) and not {"/", "\\"} & set(name)
    if not plain or not 0 < len(name.encode()) <= _LONGEST_NAME:
        raise Refused(
            f"expected {what} that can be the name of a file: 1 to {_LONGEST_NAME} bytes without / and \\ that do not"
            f" begin with . or -; got {name[:80]!r}: nothing was written"
        )
    return name


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


def writable_folder(folder: Path) -> None:
    """The folder of --out, if there is none yet: a folder that cannot be written is reported before the work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        raise UsageError(f"--out: {folder} cannot be written: {exc.strerror or exc}; choose another folder") from exc


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


def read_run(path: Path) -> admin_pb2.RunSpec:
    """The run of a file, without its table [simulation].

    Raises UsageError, which names the file and the key.
    """
    content = {key: value for key, value in read_toml(path).items() if key != SIMULATION}
    try:
        return parse_run(content)
    except ValueError as exc:
        raise UsageError(f"{path}: {exc}") from exc


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a run's file. Raises UsageError if it cannot be read, or is another program's file."""
    try:
        content = parse_toml(path.read_bytes())
    except FileNotFoundError as exc:
        raise UsageError(f"there is no file {path}: expected a run's configuration in TOML") from exc
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read as TOML: {exc}") from exc
    if other := other_kind(content, {*admin_pb2.RunSpec.DESCRIPTOR.fields_by_name, SIMULATION}):
        raise UsageError(f"{path}: expected a run's configuration: {other}")
    return content
