"""All parsers, and a folder for the files that some of them read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.fuzz.parser import Parser
from tests.fuzz.parsers import certificates, daemon, files, handlers, requests, security

MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - a file system in memory: a million inputs would keep a disk busy
GROUPS = {
    "requests": requests,
    "handlers": handlers,
    "daemon": daemon,
    "files": files,
    "certificates": certificates,
    "security": security,
}


@contextmanager
def all_parsers(*groups: str) -> Iterator[list[Parser]]:
    """The parsers of these groups, or all."""
    where = MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=where) as folder, ExitStack() as opened:
        found: list[Parser] = []
        for name, group in GROUPS.items():
            if not groups or name in groups:
                (own := Path(folder) / name).mkdir()
                found += group.parsers(own, opened)
        yield found
