"""Reads a run's TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fl_common.settings import parse_toml
from fl_ops.errors import UsageError
from protos.fl.v1 import admin_pb2
from protos.run_file import SIMULATION, parse_run


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
    """The content of a run's file. Raises UsageError if it cannot be read."""
    try:
        return parse_toml(path.read_bytes())
    except FileNotFoundError as exc:
        raise UsageError(f"there is no file {path}: expected a run's configuration in TOML") from exc
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read as TOML: {exc}") from exc
