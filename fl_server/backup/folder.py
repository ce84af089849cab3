"""The folder of a backup: what it has, and that nothing of it was damaged.

backup.json            ledger, time, and the digest of each file
ledger/TABLE.jsonl     the rows of the ledger
objects/KEY            objects that the ledger counts, below its own folder in the object store
state/...              files of the state directory: secrets of private runs, counts of charges, denials, the head of
                       the audit log; without an object store checkpoints and updates too
keys/NAME              the PEM files that the settings name
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fl_common.files import atomic_writer, fsync_path
from fl_common.settings import parse_json
from fl_server.store.errors import StoreError
from fl_server.store.files import disk_errors, file_digest

CONTENT = "backup.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Content:
    """What a backup says of itself."""

    ledger: str
    """Id of the ledger."""
    epoch: int
    has_objects: bool
    """Whether checkpoints and updates were in an object store."""
    made_at: float
    digests: dict[str, str]
    """BLAKE3-256 of each file, in hex, by its path in the folder."""


def write_content(folder: Path, ledger: str, epoch: int, *, has_objects: bool) -> Content:
    """Make the files of a backup durable, and write what they are."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CONTENT)
    with disk_errors(f"write the backup {folder}"):
        for path in [*paths, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
            fsync_path(path)
        digests = {path.relative_to(folder).as_posix(): file_digest(path).hex() for path in paths}
        content = Content(ledger, epoch, has_objects, time.time(), digests)
        with atomic_writer(folder / CONTENT) as file:
            file.write(json.dumps({"format": FORMAT, **asdict(content)}, indent=1).encode())
    return content


def read_content(folder: Path) -> Content:
    """What a backup is. Raises StoreError if a file of it is missing or has other bytes."""
    try:
        values = parse_json((folder / CONTENT).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoreError(f"expected a whole backup in {folder}, got no {CONTENT} ({error})") from error
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise StoreError(f"{folder} has another format than {FORMAT}: use the version of fl-server that made it")
    content = Content(**values)
    for name, digest in content.digests.items():
        path = folder / name
        if not path.is_file() or file_digest(path).hex() != digest:
            raise StoreError(f"the backup is damaged: {path} is missing or has other bytes than were written")
    return content
