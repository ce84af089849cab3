"""What must be equal for a saved run to be continued with the same bits: all settings, and the program."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import algorithms
import fl_client
import fl_extensions
import fl_server
import fl_tasks
import protos
from fl_ops import simulate

_PARTS = (algorithms, fl_client, fl_extensions, fl_server, fl_tasks, protos, simulate)


@cache
def program_digest() -> str:
    """SHA-256 over the text of this program's modules that take part in a simulation."""
    whole = hashlib.sha256()
    for part in _PARTS:
        root = Path(part.__path__[0])
        for path in sorted(root.rglob("*.py")):
            whole.update(f"{part.__name__}/{path.relative_to(root)}\n".encode())
            whole.update(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256:{whole.hexdigest()}"


def differences(saved: Any, now: Any, name: str = "") -> Iterator[str]:
    """A text for each value that differs, with its dotted name. saved, now: JSON values."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*saved, *now]):
            yield from differences(saved.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif saved != now:
        yield f"{name} was {saved!r} and is {now!r}"
