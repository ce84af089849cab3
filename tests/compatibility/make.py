"""`python -m tests.compatibility.make --programs ROOT`: write the stored state directories again, with another version.

ROOT is a checkout of that version. Its coordinator and daemons are stopped in the middle of two runs; their state
directories become `state-before.tar.xz`. They are then unpacked elsewhere, the same version ends the runs, and the
digests of its models become `models-before.json`.
"""

from __future__ import annotations

import argparse
import json
import tarfile
import tempfile
from pathlib import Path

from tests.compatibility.scenario import HERE, Federation
from tests.processes.process import Workspace

ARCHIVE = HERE / "state-before.tar.xz"
MODELS = HERE / "models-before.json"


def main() -> None:
    """Make both files."""
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility.make", description=__doc__)
    parser.add_argument("--programs", type=Path, required=True, metavar="ROOT", help="checkout of the older version")
    programs: Path = parser.parse_args().programs.resolve()
    with tempfile.TemporaryDirectory() as name, Workspace(Path(name)) as workspace:
        Federation(workspace, programs).begin()
        store(workspace.folder)
    with tempfile.TemporaryDirectory() as name, Workspace(Path(name)) as workspace:
        unpack(workspace.folder)
        digests = Federation(workspace, programs).continue_runs()
    MODELS.write_text(json.dumps(digests, indent=1) + "\n")


def store(folder: Path) -> None:
    """Write the archive of all state directories in a folder."""
    with tarfile.open(ARCHIVE, "w:xz") as archive:
        for state in sorted(folder.glob("*-state")):
            archive.add(state, state.name)


def unpack(folder: Path) -> None:
    """Restore the state directories."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")


if __name__ == "__main__":
    main()
