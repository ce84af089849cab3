"""The header of a safetensors file, read without torch."""

from __future__ import annotations

from pathlib import Path

from fl_common.settings import parse_json

FROZEN = "frozen"
"""Key of a checkpoint's file: digest of the frozen parameters that it leaves out."""

_LENGTH_BYTES, _MOST_BYTES = 8, 100_000_000
"""Of the header's length, and of the longest header that the format allows."""


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
