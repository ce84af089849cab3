"""Images as bytes in several blocks, which may be mapped from files beside a data set.

What takes minutes to read, such as JSON and JPEG, is read once and kept in such a file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FOLDER = "impetus-cache"
"""The folder of the files, which may be deleted at any time."""


def cache_path(folder: Path, stem: str, sources: Iterable[Path], kind: str) -> Path:
    """The file for the content of the sources: its name has a digest of their names, sizes and times of change.

    kind: how the content is read; another reading is another file. Raises OSError for a missing source.
    """
    digest = hashlib.sha256(kind.encode())
    for source in sources:
        status = source.stat()
        digest.update(f"\n{source.name} {status.st_size} {status.st_mtime_ns}".encode())
    return folder / FOLDER / f"{stem}.{digest.hexdigest()[:32]}.safetensors"


def load_cached(path: Path) -> tuple[dict[str, Tensor], dict[str, str]] | None:
    """Tensors and texts of a file; the tensors are mapped, not read. None if there is no file, or a damaged one."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError):
        return None


def save_cached(path: Path, tensors: dict[str, Tensor], texts: dict[str, str]) -> bool:
    """Write a file atomically. False if it cannot be written, as in a folder that is read-only."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(exist_ok=True)
        save_file(tensors, temporary, texts)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError):
        temporary.unlink(missing_ok=True)
        return False
    return True


def rows_of(blocks: Sequence[Tensor], rows: Tensor) -> Tensor:
    """The rows with these numbers, in this order, of blocks that are one sequence. rows: int64 [n]."""
    ends = torch.tensor([len(block) for block in blocks]).cumsum(0)
    place = torch.bucketize(rows, ends, right=True)
    chosen = torch.empty(len(rows), *blocks[0].shape[1:], dtype=blocks[0].dtype)
    for number in place.unique().tolist():
        here = place == number
        chosen[here] = blocks[number][rows[here] - (ends[number] - len(blocks[number]))]
    return chosen
