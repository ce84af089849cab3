"""The header of a safetensors file, read without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fl_common.settings import parse_json
from fl_ops.errors import UsageError

FROZEN = "frozen"
"""Key of a checkpoint's file: digest of the frozen parameters that it leaves out."""

_LENGTH_BYTES, _MOST_BYTES = 8, 100_000_000
"""Of the header's length, and of the longest header that the format allows."""


@contextmanager
def opened_model(path: Path) -> Iterator[BinaryIO]:
    """A safetensors file, open for reading. Raises UsageError for another file, of which nothing is sent."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            text = file.read(length) if length <= min(_MOST_BYTES, path.stat().st_size) else b""
            if not isinstance(parse_json(text), dict):
                raise ValueError("its header is no table")
            yield file
    except (OSError, ValueError) as error:
        raise UsageError(f"initial_model: expected a safetensors file, got {path}: {error}") from error


def frozen_digest(path: Path) -> str:
    """Digest of the frozen parameters that the file leaves out; empty for none, and for a file of another format."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        text = file.read(length) if length <= min(_MOST_BYTES, path.stat().st_size) else b""
    try:
        metadata = parse_json(text)["__metadata__"]
    except (ValueError, KeyError, TypeError):
        return ""
    found = metadata.get(FROZEN, "") if isinstance(metadata, dict) else ""
    return found if isinstance(found, str) else ""
