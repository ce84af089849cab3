"""Hides files from a process for good, by the kernel's Landlock, and starts the process of a package behind it.

    python -P -m fl_client.packages.landlock FD HIDDEN      HIDDEN: JSON, see `main`

Landlock knows grants only: what no rule grants is refused. So everything is granted beside the way to what is hidden:
each entry of each folder above it, as it is at the start. Those folders themselves cannot be listed, and what is made
in them later is hidden too. Paths are followed to where the file is, so neither links nor /proc lead around it.

It holds for the thread that asks and for the threads that this one starts. So it comes before torch and any other
thread, in which the code of a package could run instead.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from fl_common import landlock

_READ = landlock.EXECUTE | landlock.READ_FILE | landlock.READ_DIR


def version() -> int:
    """The version of the kernel's Landlock; 0: it has none."""
    try:
        return landlock.version()
    except OSError:
        return 0


def hide(hidden: Collection[Path], read: Iterable[Path] = (), write: Iterable[Path] = ()) -> bool:
    """Take these files and folders away from this thread and all that it starts. False: the kernel has no Landlock.

    Args:
        hidden: absolute paths without links; they need not exist.
        read: may be read and run, also beneath what is hidden.
        write: the same, for every access.

    Raises:
        OSError: the kernel refuses it.
    """
    known = version()
    if not known:
        return False
    # Calls of devices stay open: a GPU needs them.
    handled = landlock.FIRST | (landlock.REFER if known > 1 else 0) | (landlock.TRUNCATE if known > 2 else 0)
    whole = [(path, handled) for path in (*_beside(Path("/"), hidden), *write)]
    landlock.restrict(handled, [*whole, *((path, _READ) for path in read)])
    return True


def _beside(folder: Path, hidden: Collection[Path]) -> Iterator[Path]:
    """What is in a folder above hidden paths and leads to none of them. Links need no grant: their targets do."""
    with suppress(PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            path = folder / entry.name
            if entry.is_symlink() or path in hidden:
                continue
            if any(path in one.parents for one in hidden):
                yield from _beside(path, hidden)
            else:
                yield path


def main() -> None:
    """Hide what the daemon says, as {"hidden": [...], "read": [...], "write": [...]}, and serve as its process."""
    paths = {name: [Path(path) for path in listed] for name, listed in json.loads(sys.argv[2]).items()}
    hide(paths["hidden"], paths["read"], paths["write"])
    from fl_client.packages import process  # noqa: PLC0415 - it loads torch, which has threads

    process.serve()


if __name__ == "__main__":
    main()
